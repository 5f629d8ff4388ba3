// @ts-check
// Formulas in TeX, drawn by KaTeX, which is loaded with the first one. What it cannot read is shown as it was written.
//
//   Formula {tex, display}   display: on a line of its own
import {html, stylesheet, useLayoutEffect, useRef, useTurns} from './components.js';

const DEEPEST = 150; // elements within each other: the browser's layout is slow on more
const OPTIONS = {
  trust: false, strict: 'ignore', throwOnError: false, errorColor: 'inherit', maxSize: 20, maxExpand: 1000, // em, macros
};
let katex = null;
let loading = null;

const load = () => (loading ??= Promise.all([
  import('./vendor/katex/katex.js'), stylesheet(import.meta.url, 'vendor/katex/katex.css'),
]).then(() => { katex = globalThis.katex; }));

/** Whether it may be drawn. Styles become data: the Content-Security-Policy forbids style attributes. */
function prepare({children = [], attributes = {}}, left = DEEPEST) {
  if (attributes.style) attributes['data-style'] = attributes.style;
  delete attributes.style;
  return left > 0 && children.every((child) => prepare(child, left - 1));
}

/** The formula's element, or its text. */
function made(tex, display) {
  try {
    const tree = katex.__renderToDomTree(tex, {...OPTIONS, displayMode: display});
    if (tree.hasClass('katex-error') || !prepare(tree)) return tex;
    const element = tree.toNode();
    element.querySelectorAll('[data-style]').forEach((each) => { each.style.cssText = each.dataset.style; });
    return element;
  } catch (error) { // one that passed on would stop the whole page
    console.error(error);
    return tex;
  }
}

export function Formula({tex, display}) {
  const place = useRef(null);
  const shown = useRef(null); // what is shown as a formula
  const {hasTime, again} = useTurns();
  useLayoutEffect(() => {
    const key = `${display} ${tex}`;
    if (shown.current === key) return;
    shown.current = katex && hasTime() ? key : null;
    place.current.replaceChildren(shown.current ? made(tex, display) : tex);
    if (!shown.current) load().then(again);
  });
  return html`<span class=${display ? 'formula' : ''} ref=${place}></span>`;
}
