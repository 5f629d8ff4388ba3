// What the list and the page of a job share: its name, state and progress.
import {Badge, Progress, html} from '../components.js';
import {count, plural, seconds} from '../format.js';

const KINDS = {completed: 'ok', failed: 'error', expired: 'error', cancelled: 'warning', in_progress: 'accent'};

export const isOpen = (job) => ['validating', 'in_progress', 'finalizing', 'cancelling'].includes(job.status);
export const nameOf = (job) => job.metadata?.name ?? job.id;
export const doneOf = ({request_counts: {completed, failed}}) => completed + failed;
export const stateOf = (job) => job.status.replace('_', ' ');

export const State = ({job}) => html`<${Badge} kind=${KINDS[job.status]}>${stateOf(job)}<//>`;

/** Whole seconds as text. */
const time = (s) => (s < 60 ? `${Math.round(s)} s` : seconds(s));

/** rate: a `Rate` of the finished lines. */
export function JobProgress({job, rate}) {
  const {total, failed} = job.request_counts;
  const done = doneOf(job);
  const until = isOpen(job) ? Date.now() / 1000 : job[`${job.status}_at`];
  const left = job.status === 'in_progress' ? (total - done) / rate?.value : NaN;
  const facts = [
    total ? `${count(done)} of ${plural(total, 'line')}` : 'reading the file',
    failed > 0 && `${count(failed)} failed`,
    time(until - job.created_at),
    left < Infinity && `about ${time(left)} left`,
  ];
  const value = total || !isOpen(job) ? done : undefined;
  return html`<div class="progress">
    <${Progress} label=${`Progress of ${nameOf(job)}`} value=${value} max=${total || 1} />
    <p class="help number">${facts.filter(Boolean).join(' · ')}</p></div>`;
}
