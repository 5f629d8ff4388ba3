// The tokens of a cell, marked by their probability, and the alternatives of one of them.
import {Dialog, html, useRef, useState} from '../components.js';
import {fixed, percent} from '../format.js';

const LEVELS = [0.9, 0.5, 0.1, 0]; // each has a colour and a line, .level0 to .level3

const levelOf = ({logprob}) => LEVELS.findIndex((least) => Math.exp(logprob) >= least);
const share = ({logprob}) => percent(Math.exp(logprob), 1);
const visible = (text) => text.replaceAll(' ', '␣').replaceAll('\n', '↵').replaceAll('\t', '⇥') || 'no text';

export function TokenDialog({cell, onClose}) {
  const [chosen, setChosen] = useState(0);
  const list = useRef(null);
  const {tokens} = cell;
  const onKeyDown = (event) => {
    const next = {ArrowRight: chosen + 1, ArrowLeft: chosen - 1, Home: 0, End: tokens.length - 1}[event.key];
    if (!tokens[next]) return;
    event.preventDefault();
    list.current.children[next].focus();
  };
  return html`<${Dialog} open wide title=${`Tokens: ${cell.name}`} onClose=${onClose}>
    <div class="row small">${LEVELS.map((least, i) => html`<span class=${`token level${i}`}>
      ${i ? `${percent(least)} to ${percent(LEVELS[i - 1])}` : `${percent(least)} or more`}</span>`)}</div>
    <div class="tokens" role="group" aria-label="Tokens; use the arrow keys to move" ref=${list} onKeyDown=${onKeyDown}>
      ${tokens.map((token, i) => html`<button type="button" key=${i} class=${`token level${levelOf(token)}`}
        tabindex=${i === chosen ? 0 : -1} aria-current=${i === chosen || undefined} onFocus=${() => setChosen(i)}
        onPointerEnter=${() => setChosen(i)} title=${share(token)} aria-label=${`${visible(token.text)}, ${share(token)}`}
        >${token.text.includes('\n') ? html`${visible(token.text)}<br />` : token.text || '␃'}</button>`)}</div>
    <${Alternatives} token=${tokens[chosen]} /><//>`;
}

function Alternatives({token}) {
  const all = token.top.some(({text}) => text === token.text) ? token.top : [...token.top, token];
  return html`<table class="alternatives"><caption class="hidden-text">The token and its alternatives</caption>
    <thead><tr><th scope="col">Token</th><th scope="col" class="end">Probability</th><td></td>
      <th scope="col" class="end">Log-probability</th></tr></thead>
    <tbody>${all.map((each) => html`<tr class=${each.text === token.text ? 'taken' : ''}>
      <th scope="row"><span class="mono">${visible(each.text)}</span>${each.text === token.text && ' taken'}</th>
      <td class="end">${share(each)}</td><td><meter value=${Math.exp(each.logprob)} aria-label="Probability" /></td>
      <td class="end">${fixed(each.logprob, 3)}</td></tr>`)}</tbody></table>`;
}
