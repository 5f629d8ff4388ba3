import {EmptyState, html} from '../components.js';

export const Chat = () => html`<${EmptyState} title="Chat">This tab is not there yet.<//>`;
