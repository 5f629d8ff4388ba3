// @ts-check
// Markdown that a model wrote, as elements.
//
//   Markdown {text, streaming}   only blocks that have changed are made again; code is highlighted line by line
//
// marked reads the text into tokens (markdown_blocks.js), and Preact makes an element of each: what a model wrote is never parsed as HTML,
// so there is nothing to sanitise, and the Content-Security-Policy (Trusted Types) forbids such parsing. HTML in the
// text is shown as text, and images as links: the page loads nothing from elsewhere.
import {CopyButton, html, lazy, useLayoutEffect, useMemo, useRef, useTurns} from './components.js';
import {MarkdownBlocks} from './markdown_blocks.js';

// Loaded when an answer has a formula, a diagram or code.
const Formula = lazy(() => import('./formula.js').then((module) => module.Formula), ({tex}) => tex);
const Diagram = lazy(() => import('./diagram.js').then((module) => module.Diagram), ({children}) => children);
let colours = null; // highlight.js

const LONGEST = 20_000; // characters of code that are highlighted
const STREAMED = 4000; // characters that are highlighted before the code is whole
const GROWTH = 1.05; // times so many are highlighted again then: each is read some twenty times, not once a line
const GROUP = 64; // blocks
const SLOW = /\S{200}|\s{80}/; // in code: not highlighted
const SLOW_XML = /(<[^<>]*){9}/;
const SAFE_LINK = /^(https?|mailto):/i;
const ENTITY = /&(?:#(\d{1,7})|#x([\da-f]{1,6})|(\w+));/gi;
const ENTITIES = {
  amp: '&', lt: '<', gt: '>', quot: '"', apos: '\'', nbsp: '\u00a0', hellip: '…', ndash: '–', mdash: '—', copy: '©',
  times: '×', deg: '°', middot: '·', bull: '•', rarr: '→', larr: '←', le: '≤', ge: '≥', ne: '≠', euro: '€',
};

const isSlow = (code, language) => code.length > LONGEST || SLOW.test(code)
  || (language === 'xml' && SLOW_XML.test(code));

function Code({text, lang, isWhole}) {
  const {hasTime, again} = useTurns();
  const shown = useRef({});
  const next = useRef(null); // what is being read
  useLayoutEffect(() => {
    let stop = null;
    let isGone = false;
    import('./highlight.js').then((module) => {
      colours = module;
      if (isGone) return;
      stop = module.onLoad(() => {
        shown.current = {};
        again();
      });
      again();
    });
    return () => {
      isGone = true;
      stop?.();
    };
  }, []);
  const name = (lang ?? '').split(/\s/)[0].toLowerCase();
  const language = colours?.languageOf(name);
  const {head: before = ''} = shown.current;
  if (!text.startsWith(before)) shown.current = {};
  const lines = isWhole ? text : text.slice(0, text.slice(0, STREAMED).lastIndexOf('\n') + 1);
  const isNew = isWhole ? shown.current.head !== text : lines.length > GROWTH * (shown.current.head ?? '').length;
  if (isNew && language && !isSlow(lines, language)) {
    if (!colours.isLoaded(language)) colours.load(language);
    else {
      if (next.current?.code !== lines) next.current = new colours.Highlighter(lines, language);
      if (next.current.read(hasTime)) shown.current = {head: lines, parts: next.current.elements};
      else again();
    }
  }
  const {head, parts} = shown.current;
  return html`<div class="code">
    <div class="code-head"><span>${name || 'text'}</span><${CopyButton} text=${text} /></div>
    <pre tabindex="0"><code>${parts ? [...parts, text.slice(head.length)] : text}</code></pre></div>`;
}

const plain = (text) => text.replace(ENTITY, (whole, decimal, hex, name) => {
  if (name) return Object.hasOwn(ENTITIES, name) ? ENTITIES[name] : whole;
  const code = decimal ? Number(decimal) : parseInt(hex, 16);
  return code && code <= 0x10ffff ? String.fromCodePoint(code) : '\ufffd';
});

const link = (href, inner) => (SAFE_LINK.test(href)
  ? html`<a href=${href} target="_blank" rel="noopener noreferrer nofollow">${inner}</a>` : inner);

const jump = (to) => (event) => event.currentTarget.closest('.markdown').querySelector(to)?.focus();

/** A reference to a footnote, which leads there, and from there back. Names are data: ids of several answers would meet. */
const FootnoteMark = ({name}) => html`<sup><button type="button" class="mark" data-mark=${name} aria-label=${`Footnote ${name}`}
  onClick=${jump(`[data-note="${CSS.escape(name)}"]`)}>${name}</button></sup>`;

const Footnote = ({name, children}) => html`<p class="footnote"><button type="button" class="mark" data-note=${name}
  aria-label=${`Back from footnote ${name}`} onClick=${jump(`[data-mark="${CSS.escape(name)}"]`)}>${name}</button> ${children}</p>`;

/** The element of a token, by its type. `inner(tokens)`: those of the tokens within it. */
const ELEMENTS = {
  space: () => null,
  def: () => null,
  text: ({text, tokens}, inner) => (tokens ? inner(tokens) : plain(text)),
  escape: ({text}) => text,
  plain: ({text}) => html`<span class="plain">${text}</span>`,
  html: ({text, block}) => (block ? html`<p class="plain">${text}</p>` : text),
  br: () => html`<br />`,
  footnote: ({name, tokens}, inner) => html`<${Footnote} name=${name}>${inner(tokens)}<//>`,
  mark: ({name}) => html`<${FootnoteMark} name=${name} />`,
  raised: ({name, tokens}, inner) => html`<${name}>${inner(tokens)}<//>`,
  hr: () => html`<hr />`,
  strong: ({tokens}, inner) => html`<strong>${inner(tokens)}</strong>`,
  em: ({tokens}, inner) => html`<em>${inner(tokens)}</em>`,
  del: ({tokens}, inner) => html`<del>${inner(tokens)}</del>`,
  codespan: ({text}) => html`<code>${text}</code>`,
  link: ({href, tokens}, inner) => link(href, inner(tokens)),
  formula: ({text, display}) => html`<${Formula} tex=${text} display=${display} />`,
  image: ({href, text}) => link(href, text || href),
  checkbox: ({checked}) => `${checked ? '☑' : '☐'} `,
  paragraph: ({tokens}, inner) => html`<p>${inner(tokens)}</p>`,
  heading: ({depth, tokens}, inner) => html`<${`h${depth}`}>${inner(tokens)}<//>`,
  blockquote: ({tokens}, inner) => html`<blockquote>${inner(tokens)}</blockquote>`,
  list: ({ordered, start, items}, inner) => html`<${ordered ? 'ol' : 'ul'} start=${ordered ? start : undefined}>
    ${items.map(({tokens}) => html`<li>${inner(tokens)}</li>`)}<//>`,
  code({text, lang}, _inner, isWhole) {
    const code = html`<${Code} text=${text} lang=${lang} isWhole=${isWhole} />`;
    return isWhole && lang === 'mermaid' ? html`<${Diagram} text=${text}>${code}<//>` : code;
  },
  table({header, rows}, inner) {
    const row = (name, cells) => html`<tr>${cells.map(({align, tokens}) =>
      html`<${name} style=${{textAlign: align}}>${inner(tokens)}<//>`)}</tr>`;
    return html`<div class="code-table" tabindex="0"><table><thead>${row('th', header)}</thead>
      <tbody>${rows.map((cells) => row('td', cells))}</tbody></table></div>`;
  },
};

const BREAKS = /^(\s*<br\s*\/?>\s*)+$/i;

/** With <br>, <sub> and <sup> of HTML as tokens; other HTML stays text. */
function withTags(tokens) {
  const found = [];
  for (let i = 0; i < tokens.length; i++) {
    const {type, text} = tokens[i];
    const [, name] = (type === 'html' && /^<(su[bp])>$/i.exec(text)) || [];
    const end = name ? tokens.findIndex((each, j) => j > i && each.type === 'html' && each.text.toLowerCase() === `</${name.toLowerCase()}>`) : -1;
    if (end > i) found.push({type: 'raised', name: name.toLowerCase(), tokens: tokens.slice(i + 1, end)});
    else found.push(type === 'html' && BREAKS.test(text) ? {type: 'br'} : tokens[i]);
    i = Math.max(i, end);
  }
  return found;
}

const elements = (tokens, isWhole) => withTags(tokens).map((token) =>
  ELEMENTS[token.type](token, (inner) => elements(inner, isWhole), isWhole));

/** Elements in groups: the browser lays out those in view, and Preact compares those that have changed. */
function inGroups(parts, known) {
  return Array.from({length: Math.ceil(parts.length / GROUP)}, (_, i) => {
    const some = parts.slice(i * GROUP, (i + 1) * GROUP);
    if (known[i]?.some.length === some.length && known[i].some.every((part, j) => part === some[j])) return known[i];
    return {some, group: html`<div key=${i} class=${some.length === GROUP ? 'group' : ''}>${some}</div>`};
  });
}

/** Long texts are read and shown in turns, so that the page answers in between. */
export function Markdown({text, streaming = false}) {
  const blocks = useMemo(() => new MarkdownBlocks(), []);
  const shown = useRef({parts: [], groups: []});
  const {hasTime, again} = useTurns();
  const parts = [];
  const isRead = blocks.read(text, !streaming, hasTime);
  for (const block of isRead ? blocks.all : []) {
    const {isWhole} = block;
    if (block.shown?.isWhole !== isWhole) {
      if (!hasTime()) break;
      block.shown = {isWhole, element: html`<div key=${parts.length}>${elements(block.tokens, isWhole)}</div>`};
    }
    parts.push(block.shown.element);
  }
  const isDone = isRead && parts.length === blocks.all.length;
  if (isDone || parts.length > shown.current.parts.length) {
    shown.current = {parts, groups: inGroups(parts, shown.current.groups)};
  }
  if (!isDone) again();
  return html`<div class="markdown">${shown.current.groups.map(({group}) => group)}</div>`;
}
