import {EmptyState, html} from '../components.js';

export const Jobs = () => html`<${EmptyState} title="Jobs">This tab is not there yet.<//>`;
