// @ts-check
// Where the next message is written. onSend returns whether it has taken the text. Enter sends, Shift+Enter begins a new line; on touch screens the button sends.
import {Button, html, useEffect, useRef, useState} from '../components.js';

export function Composer({conversationId, isRunning, active, onSend, onStop}) {
  const [text, setText] = useState('');
  const input = useRef(null);
  const isTouch = matchMedia('(pointer: coarse)').matches;
  useEffect(() => {
    if (active && !isTouch && !document.querySelector('dialog[open]')) input.current.focus();
  }, [conversationId, active]);
  const send = (event) => {
    event.preventDefault();
    if (text.trim() && onSend(text.trim())) setText('');
  };
  const onKeyDown = (event) => {
    if (event.key === 'Enter' && !event.shiftKey && !event.isComposing && !isTouch) send(event);
    if (event.key === 'Escape' && isRunning) onStop();
  };
  return html`<form class="composer" onSubmit=${send}>
    <textarea ref=${input} rows="1" aria-label="Message" placeholder="Write a message" value=${text}
      aria-description=${isTouch ? undefined : 'Enter sends, Shift and Enter begin a new line'}
      onInput=${({target}) => setText(target.value)} onKeyDown=${onKeyDown} />
    ${isRunning
      ? html`<${Button} kind="primary" icon="stop" label="Stop" onClick=${onStop} />`
      : html`<${Button} kind="primary" icon="send" label="Send" type="submit" disabled=${!text.trim()} />`}
  </form>`;
}
