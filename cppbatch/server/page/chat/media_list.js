// @ts-check
// The images and audio of a message, to look at and to listen to. With onRemove(index), each has a button.
import {Button, html} from '../components.js';

export const Media = ({media, onRemove}) => media?.length > 0 && html`<ul class="media" aria-label="Attached">
  ${media.map(({kind, name, url}, i) => html`<li key=${url}>
    ${kind === 'image' ? html`<img src=${url} alt=${name} title=${name} />`
    : html`<figure><audio controls src=${url} aria-label=${name} /><figcaption>${name}</figcaption></figure>`}
    ${onRemove && html`<${Button} icon="close" label=${`Remove ${name}`} onClick=${() => onRemove(i)} />`}</li>`)}
</ul>`;
