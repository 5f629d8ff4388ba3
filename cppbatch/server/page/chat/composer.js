// @ts-check
// Where the next message is written, and files are attached to it: chosen, pasted, or dropped anywhere on the tab. onSend returns
// whether it has taken the message. Enter sends, Shift+Enter begins a new line; on touch screens the button sends.
import {Button, html, lazy, toast, useEffect, useLayoutEffect, useRef, useState} from '../components.js';

const ContextMeter = lazy(() => import('./context_meter.js').then((module) => module.ContextMeter));
const Media = lazy(() => import('./media_list.js').then((module) => module.Media));

const TEXTS = 'text/*,application/json,.md,.csv,.tsv,.jsonl,.pdf,.yaml,.yml,.toml,.ini,.log,.xml,.tex,.py,.js,.ts,.tsx,.java,'
  + '.c,.h,.cpp,.cs,.go,.rs,.rb,.php,.swift,.kt,.scala,.sh,.sql,.r,.lua,.diff,.patch';

/** What the file field takes. */
const acceptOf = (modalities) => [TEXTS,
  ...(modalities?.vision ? ['image/*'] : []), ...(modalities?.audio ? ['audio/wav', 'audio/mpeg', 'audio/flac'] : []),
].join(',');

export function Composer({conversationId, isRunning, active, modalities, used, limit, keep, request, model, onSend, onStop}) {
  const [text, setText] = useState('');
  const [media, setMedia] = useState([]);
  const [over, setOver] = useState(false);
  const input = useRef(null);
  const chooser = useRef(null);
  const isTouch = matchMedia('(pointer: coarse)').matches;
  const accept = acceptOf(modalities);
  useEffect(() => {
    if (active && !isTouch && !document.querySelector('dialog[open]')) input.current.focus();
  }, [conversationId, active]);
  const attach = async (files) => {
    for (const file of files) {
      try {
        const {readMedia} = await import('./attachments.js');
        const medium = await readMedia(file, modalities);
        if (medium.kind === 'text' && limit) medium.tokens = await (await import('./context_meter.js')).tokensOf(medium.text, model);
        setMedia((now) => [...now, medium]);
      } catch (error) {
        toast(`${file.name || 'The file'} was not attached: ${error.message}.`, 'error');
      }
    }
    input.current?.focus();
  };
  const written = [...media.flatMap(({text: file}) => file ?? []), text].join('\n');
  const send = (event) => {
    event.preventDefault();
    if (!(text.trim() || media.length) || !onSend(text.trim(), media)) return;
    setText('');
    setMedia([]);
  };
  const onKeyDown = (event) => {
    if (event.key === 'Enter' && !event.shiftKey && !event.isComposing && !isTouch) send(event);
    if (event.key === 'Escape' && isRunning) onStop();
  };
  const onPaste = (event) => {
    const {files} = event.clipboardData;
    if (!files.length) return;
    event.preventDefault();
    attach([...files]);
  };
  const onDrag = (event) => {
    if (!event.dataTransfer.types.includes('Files')) return;
    event.preventDefault();
    setOver(event.type === 'dragover');
    if (event.type === 'drop') attach([...event.dataTransfer.files]);
  };
  useLayoutEffect(() => {
    if (!active) return undefined;
    const types = ['dragover', 'dragleave', 'drop'];
    types.forEach((type) => addEventListener(type, onDrag));
    return () => types.forEach((type) => removeEventListener(type, onDrag));
  });
  const onChoose = ({target}) => {
    attach([...target.files]);
    target.value = '';
  };
  return html`<form class=${`composer ${over ? 'over' : ''}`} onSubmit=${send}>
    ${media.length > 0 && html`<${Media} media=${media} onRemove=${(i) => setMedia(media.toSpliced(i, 1))} />`}
    <${Button} icon="attach" label="Attach files" onClick=${() => chooser.current.click()} />
    <input ref=${chooser} type="file" hidden multiple accept=${accept} aria-label="Files to attach"
      onChange=${onChoose} />
    <textarea ref=${input} rows="1" aria-label="Message" placeholder="Write a message" value=${text}
      aria-description=${isTouch ? undefined : 'Enter sends the message, Shift+Enter starts a new line'}
      onInput=${({target}) => setText(target.value)} onKeyDown=${onKeyDown} onPaste=${onPaste} />
    ${isRunning
      ? html`<${Button} kind="primary" icon="stop" label="Stop" onClick=${onStop} />`
      : html`<${Button} kind="primary" icon="send" label="Send" type="submit"
        disabled=${!text.trim() && !media.length} />`}
    ${limit && (text.trim() || media.length || used > 0) ? html`<${ContextMeter} text=${written} used=${used} limit=${limit} keep=${keep} request=${request} model=${model} />` : null}
  </form>`;
}
