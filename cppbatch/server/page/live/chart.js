// @ts-check
// A chart of the last two minutes: lines, or areas on top of each other.
import {html, useMemo} from '../components.js';
import {SECONDS} from './live_history.js';
import {axisEnd} from './scales.js';

/**
 * `series`: [{label, of, colour, beside}]: the name of a value of the samples, and whether it is not drawn. `areas`: on
 * top of each other, the first one lowest. `ago`: seconds before the last sample; the values of that time are shown, in
 * all charts; null: the last ones. `onAgo(ago)`: the pointer or a key chose another time.
 */
export function Chart({title, samples, series, format, areas = false, ago, onAgo}) {
  const now = samples[samples.length - 1]?.time ?? 0;
  const drawn = series.filter(({beside}) => !beside);
  const {end, paths} = useMemo(() => plot(samples, now, drawn, areas), [now, samples.length]);
  const shown = samples.findLast(({time}) => time <= now - (ago ?? 0) + 1e-6) ?? {};
  const choose = (seconds) => onAgo(Math.min(SECONDS, Math.max(0, seconds)));
  const point = (event) => {
    const {left, width} = event.currentTarget.getBoundingClientRect();
    choose(SECONDS * (1 - (event.clientX - left) / width));
  };
  const press = (event) => {
    const step = {ArrowLeft: 1, ArrowRight: -1, PageUp: 10, PageDown: -10, Home: SECONDS, End: -SECONDS}[event.key];
    if (event.key === 'Escape') onAgo(null);
    if (!step) return;
    event.preventDefault();
    choose(Math.round(ago ?? 0) + step);
  };
  const values = series.map(({of}) => format(shown[of] ?? NaN));
  const when = ago === null ? 'now' : `${Math.round(ago)} s ago`;
  const look = ({colour}, i) => `c${colour} ${areas ? `area${i % 2}` : `line${i}`}`;
  return html`<figure>
    <figcaption><b>${title}</b> <span>${when}</span></figcaption>
    <div class="plot" tabindex="0" role="slider" aria-label=${`${title}: time`} aria-valuemin=${-SECONDS} aria-valuemax="0"
      aria-valuenow=${-Math.round(ago ?? 0)}
      aria-valuetext=${`${when}: ${series.map(({label}, i) => `${label} ${values[i]}`).join(', ')}`}
      onPointerMove=${point} onPointerDown=${point} onPointerLeave=${() => onAgo(null)} onBlur=${() => onAgo(null)}
      onKeyDown=${press}>
      <svg viewBox=${`0 0 ${SECONDS * 10} 100`} preserveAspectRatio="none" aria-hidden="true">
        <path class="grid" d="M0 .5H1200M0 50H1200M0 99.5H1200" />
        ${paths.map((path, i) => html`<path class=${look(drawn[i], i)} d=${path} />`)}
        ${ago !== null && html`<path class="cursor" d=${`M${(SECONDS - ago) * 10} 0V100`} />`}
      </svg><span class="end">${format(end)}</span></div>
    <ul>${series.map((each, i) => html`<li>${!each.beside && html`<svg viewBox="0 0 14 10" aria-hidden="true"><path
      class=${look(each, i)} d=${areas ? 'M0 0H14V10H0z' : 'M0 5H14'} /></svg>`}${each.label} <b>${values[i]}</b></li>`)}</ul>
  </figure>`;
}

/** The end of the axis and the path of each series, in tenths of a second and hundredths of the axis. */
function plot(samples, now, series, areas) {
  const x = samples.map(({time}) => Math.round((SECONDS - now + time) * 10));
  const rows = series.map(({of}) => samples.map((sample) => sample[of] ?? NaN));
  if (areas) rows.forEach((row, i) => row.forEach((value, j) => { row[j] = (value || 0) + (i ? rows[i - 1][j] : 0); }));
  const end = axisEnd(Math.max(0, ...rows.flat().filter((value) => value > 0)));
  const y = (value) => (99.5 - (value / end) * 99).toFixed(1);
  const paths = rows.map((row, i) => {
    let path = '';
    row.forEach((value, j) => {
      if (!Number.isNaN(value)) path += `${j && !Number.isNaN(row[j - 1]) ? 'L' : 'M'}${x[j]} ${y(value)}`;
    });
    if (areas) for (let j = x.length - 1; j >= 0; j -= 1) path += `L${x[j]} ${y(i ? rows[i - 1][j] : 0)}`;
    return path;
  });
  return {end, paths};
}
