import {EmptyState, html} from '../components.js';

export const Models = () => html`<${EmptyState} title="Models">This tab is not there yet.<//>`;
