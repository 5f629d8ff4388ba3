// A chart of the last two minutes: lines, or areas on top of each other.
import {html, useMemo} from '../components.js';
import {SECONDS} from './live_history.js';
import {colourOf} from './live_layout.js';

/** `series`: [[label, name of a value of the samples]]; `colour`: of the first one. `ago`: the seconds before the last
 * sample whose values are told, in all charts, or null. `onAgo(ago)`: others are chosen. */
export function Chart({title, samples, series, colour, format, areas, ago, onAgo}) {
  const now = samples[samples.length - 1].time;
  const {end, paths} = useMemo(() => plot(samples, now, series.map(([, name]) => name), areas), [samples]);
  const told = samples.findLast(({time}) => time <= now - ago + 1e-3) ?? {};
  const choose = (seconds) => onAgo(Math.min(SECONDS, Math.max(0, seconds)));
  const point = (event) => {
    const {left, width} = event.currentTarget.getBoundingClientRect();
    choose(SECONDS * (1 - (event.clientX - left) / width));
  };
  const press = (event) => {
    const step = {ArrowLeft: 1, ArrowRight: -1, PageUp: 10, PageDown: -10}[event.key];
    if (event.key === 'Escape') onAgo(null);
    if (!step) return;
    event.preventDefault();
    choose(Math.round(ago) + step);
  };
  const values = series.map(([, name]) => format(told[name] ?? NaN));
  const when = ago === null ? 'now' : `${Math.round(ago)} s ago`;
  const path = (d, i) => html`<path class=${(areas ? 'area' : 'line') + i % 2} style=${colourOf(colour + i)} d=${d} />`;
  return html`<figure>
    <figcaption><b>${title}</b> <span>${when}</span></figcaption>
    <div class="plot" tabindex="0" role="slider" aria-label=${`${title}: time`} aria-valuemin=${-SECONDS}
      aria-valuemax="0" aria-valuenow=${-Math.round(ago)}
      aria-valuetext=${`${when}: ${series.map(([label], i) => `${label} ${values[i]}`).join(', ')}`}
      onPointerMove=${point} onPointerDown=${point} onPointerLeave=${() => onAgo(null)} onBlur=${() => onAgo(null)}
      onKeyDown=${press}>
      <svg viewBox=${`0 0 ${SECONDS * 10} 100`} preserveAspectRatio="none" aria-hidden="true">
        <path class="grid" d="M0 .5H1200M0 50H1200M0 99.5H1200" />
        ${paths.map(path)}
        ${ago !== null && html`<path class="cursor" d=${`M${(SECONDS - ago) * 10} 0V100`} />`}
      </svg><span>${format(end)}</span></div>
    <ul>${series.map(([label], i) => html`<li><svg viewBox="0 0 14 10" aria-hidden="true">${
      path(areas ? 'M0 0H14V10H0z' : 'M0 5H14', i)}</svg>${label} <b>${values[i]}</b></li>`)}</ul>
  </figure>`;
}

/** The end of the axis and the path of each series, in tenths of a second and hundredths of the axis. */
function plot(samples, now, names, areas) {
  const x = samples.map(({time}) => Math.round((SECONDS - now + time) * 10));
  const rows = names.map((name) => samples.map((sample) => sample[name] ?? NaN));
  if (areas) rows.forEach((row, i) => row.forEach((value, j) => { row[j] = (value || 0) + (rows[i - 1]?.[j] ?? 0); }));
  const end = axisEnd(Math.max(0, ...rows.flat().filter((value) => value)));
  const y = (value) => (99.5 - (value / end) * 99).toFixed(1);
  const paths = rows.map((row, i) => {
    let path = '';
    row.forEach((value, j) => {
      if (value >= 0) path += `${row[j - 1] >= 0 ? 'L' : 'M'}${x[j]} ${y(value)}`;
    });
    if (areas) for (let j = x.length - 1; j >= 0; j -= 1) path += `L${x[j]} ${y(rows[i - 1]?.[j] ?? 0)}`;
    return path;
  });
  return {end, paths};
}

/** The smallest of 1, 2, 5, 10, 20 ... that is at least `value`. */
export function axisEnd(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((end) => end >= value * 0.999999);
}
