// @ts-check
// The images, audio and texts of a message. With onRemove(index), each has a button.
import {Button, html} from '../components.js';
import {plural} from '../format.js';

const Text = ({name, text, tokens}) => html`<details class="chip"><summary>${name}<span class="muted"> ${
  tokens === undefined ? plural(text.length, 'character') : plural(tokens, 'token')}</span></summary><pre tabindex="0">${text}</pre></details>`;

export const Media = ({media, onRemove}) => media?.length > 0 && html`<ul class="media" aria-label="Attached">
  ${media.map(({kind, name, url, ...text}, i) => html`<li key=${url ?? `${name} ${i}`}>
    ${kind === 'text' ? html`<${Text} name=${name} ...${text} />` : kind === 'image' ? html`<img src=${url} alt=${name} title=${name} />`
    : html`<figure><audio controls src=${url} aria-label=${name} /><figcaption>${name}</figcaption></figure>`}
    ${onRemove && html`<${Button} icon="close" label=${`Remove ${name}`} onClick=${() => onRemove(i)} />`}</li>`)}
</ul>`;
