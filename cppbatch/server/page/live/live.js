import {EmptyState, html} from '../components.js';

export const Live = () => html`<${EmptyState} title="Live">This tab is not there yet.<//>`;
