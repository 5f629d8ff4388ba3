import {EmptyState, html} from '../components.js';

export const Playground = () => html`<${EmptyState} title="Playground">This tab is not there yet.<//>`;
