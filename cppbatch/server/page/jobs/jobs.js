// The Jobs tab: files of requests (/v1/files, /v1/batches), checked, started, watched and downloaded.
// #jobs is the list with the form of a new job, #jobs/ID a job.
import {request} from '../api.js';
import {Button, EmptyState, Notice, html, stylesheet, useEffect, usePolling, useRef, useState} from '../components.js';
import {ago} from '../format.js';
import {JobDetails} from './job_details.js';
import {JobForm} from './job_form.js';
import {JobProgress, State, doneOf, isOpen, nameOf} from './job_parts.js';
import {Rate} from './results.js';

await stylesheet(import.meta.url, 'jobs.css');

const POLL_MS = 2000;
const PAGE = 20;

const idInHash = () => /^#jobs\/(.+)/.exec(location.hash)?.[1] ?? null;

const JobItem = ({job, rate}) => html`<li class="card"><div class="row">
    <a class="grow name" href=${`#jobs/${job.id}`}>${nameOf(job)}</a><${State} job=${job} />
    <span class="muted small">${ago(job.created_at)}</span></div>
  <${JobProgress} job=${job} rate=${rate} /></li>`;

export function Jobs({active, server}) {
  const [id, setId] = useState(idInHash());
  const [jobs, setJobs] = useState([]);
  const [hasMore, setHasMore] = useState(null); // null: nothing is loaded
  const [job, setJob] = useState(null);
  const [error, setError] = useState(null);
  const [version, setVersion] = useState(0);
  const [limit, setLimit] = useState(PAGE);
  const rates = useRef({});

  useEffect(() => {
    const follow = () => { if (location.hash.startsWith('#jobs')) setId(idInHash()); };
    addEventListener('hashchange', follow);
    return () => removeEventListener('hashchange', follow);
  }, []);

  const load = async (isEnded) => {
    const loaded = [];
    let more = true;
    try {
      if (id) loaded.push(await request(`/v1/batches/${id}`));
      while (!id && more && loaded.length < limit) {
        const after = loaded.length ? `&after=${loaded.at(-1).id}` : '';
        const page = await request(`/v1/batches?limit=${PAGE}${after}`);
        loaded.push(...page.data);
        more = page.has_more;
      }
    } catch (failure) {
      if (!isEnded()) setError(failure);
      return [0, 503].includes(failure.status) && failure.code !== 'no_storage' && POLL_MS; // it may be starting
    }
    if (isEnded()) return false;
    for (const each of loaded) {
      if (each.status !== 'in_progress') continue;
      (rates.current[each.id] ??= new Rate()).add(doneOf(each), performance.now() / 1000);
    }
    setError(null);
    if (id) {
      setJob(loaded[0]);
    } else {
      setJobs(loaded);
      setHasMore(more);
    }
    return loaded.some(isOpen) && POLL_MS;
  };
  usePolling(load, active, [id, limit, version, server.health.status]);

  const started = (batch, hasNext) => {
    if (hasNext) setVersion((now) => now + 1);
    else location.hash = `jobs/${batch.id}`;
  };
  const problem = error && html`<${Notice} kind="error">${error.message}<//>`;
  if (id) {
    return html`<div class="page stack"><div><a href="#jobs">All jobs</a></div>${problem}
      ${job?.id === id && html`<${JobDetails} key=${id} job=${job} rate=${rates.current[id]} server=${server}
        onChange=${() => setVersion((now) => now + 1)} />`}</div>`;
  }
  if (error?.code === 'no_storage') {
    return html`<${EmptyState} title="No jobs on this server" icon="alert">${error.message}<//>`;
  }
  return html`<div class="page stack"><h1 class="hidden-text">Jobs</h1>
    <${JobForm} server=${server} onStarted=${started} />
    ${problem}
    ${jobs.length > 0 && html`<h2>Jobs</h2><ul class="stack">${jobs.map((each) => html`
      <${JobItem} key=${each.id} job=${each} rate=${rates.current[each.id]} />`)}</ul>`}
    ${hasMore && html`<div><${Button} onClick=${() => setLimit(limit + PAGE)}>Show older jobs<//></div>`}
    ${hasMore === false && !jobs.length && html`<p class="muted">No jobs yet. A job answers every line of a file in the
      background: it yields to other requests, continues after a restart, and keeps its results here.</p>`}
  </div>`;
}
