// @ts-check
// Markdown that a model wrote, as elements.
//
//   Markdown {text, streaming}   only blocks that have changed are made again; code is highlighted when it is whole
//
// marked reads the text into tokens, and Preact makes an element of each: what a model wrote is never parsed as HTML,
// so there is nothing to sanitise, and the Content-Security-Policy (Trusted Types) forbids such parsing. HTML in the
// text is shown as text, and images as links: the page loads nothing from elsewhere.
import {CopyButton, html, useEffect, useReducer, useRef} from './components.js';
import {Marked} from './vendor/marked.js';

const DEEPEST = 50; // levels of quotations and lists; what is deeper is shown as it was written
const LONGEST = 50_000; // characters of code that are highlighted
const LANGUAGES = new Set('bash c diff go java js json py rs todo toml xml yaml'.split(' '));
const ALIASES = {
  sh: 'bash', shell: 'bash', zsh: 'bash', console: 'bash', h: 'c', 'c++': 'c', cpp: 'c', cc: 'c', patch: 'diff',
  golang: 'go', javascript: 'js', jsx: 'js', ts: 'js', typescript: 'js', tsx: 'js', python: 'py', python3: 'py',
  rust: 'rs', html: 'xml', svg: 'xml', yml: 'yaml',
};
const SAFE_LINK = /^(https?|mailto):/i;
const ENTITY = /&(?:#(\d{1,7})|#x([\da-f]{1,6})|(\w+));/gi;
const ENTITIES = {
  amp: '&', lt: '<', gt: '>', quot: '"', apos: '\'', nbsp: '\u00a0', hellip: '…', ndash: '–', mdash: '—', copy: '©',
  times: '×', deg: '°', middot: '·', bull: '•', rarr: '→', larr: '←', le: '≤', ge: '≥', ne: '≠', euro: '€',
};

let tokenizer = null;
const grammars = {}; // by language; undefined: not loaded
const wanted = new Set();
const listeners = new Set();

/** Loads the grammar of a language; code that is shown is then highlighted. */
async function load(language) {
  if (wanted.has(language)) return;
  wanted.add(language);
  const file = (name) => import(`./vendor/highlight/${name}.js`);
  [{tokenizer}, {default: grammars[language]}] = await Promise.all([file('tokenize'), file(language)]);
  listeners.forEach((listener) => listener());
}

/** Code with its highlighted parts. Grammars of languages within the language (JS in HTML) are loaded when met. */
function highlighted(code, name) {
  const language = ALIASES[name] ?? name;
  if (!LANGUAGES.has(language) || code.length > LONGEST) return code;
  if (!grammars[language]) {
    load(language);
    return code;
  }
  const parts = [];
  const steps = tokenizer(code, grammars[language], (text, type) => {
    parts.push(type ? html`<span class=${`code-${type}`}>${text}</span>` : text);
  });
  for (let step = steps.next(); !step.done; step = steps.next(grammars[step.value])) {
    if (LANGUAGES.has(step.value)) load(step.value);
  }
  return parts;
}

function Code({text, lang, isWhole}) {
  const [, update] = useReducer((n) => n + 1, 0);
  useEffect(() => {
    listeners.add(update);
    return () => { listeners.delete(update); };
  }, []);
  const name = (lang ?? '').split(/\s/)[0].toLowerCase();
  return html`<div class="code">
    <div class="code-head"><span>${name || 'text'}</span><${CopyButton} text=${text} /></div>
    <pre tabindex="0"><code>${isWhole ? highlighted(text, name) : text}</code></pre></div>`;
}

const plain = (text) => text.replace(ENTITY, (whole, decimal, hex, name) => {
  if (name) return Object.hasOwn(ENTITIES, name) ? ENTITIES[name] : whole;
  const code = decimal ? Number(decimal) : parseInt(hex, 16);
  return code && code <= 0x10ffff ? String.fromCodePoint(code) : '\ufffd';
});

const link = (href, inner) => (SAFE_LINK.test(href)
  ? html`<a href=${href} target="_blank" rel="noopener noreferrer nofollow">${inner}</a>` : inner);

/** The element of a token, by its type. `inner(tokens)`: those of the tokens within it. */
const ELEMENTS = {
  space: () => null,
  def: () => null,
  text: ({text, tokens}, inner) => (tokens ? inner(tokens) : plain(text)),
  escape: ({text}) => text,
  html: ({text, block}) => (block ? html`<p class="plain">${text}</p>` : text),
  br: () => html`<br />`,
  hr: () => html`<hr />`,
  strong: ({tokens}, inner) => html`<strong>${inner(tokens)}</strong>`,
  em: ({tokens}, inner) => html`<em>${inner(tokens)}</em>`,
  del: ({tokens}, inner) => html`<del>${inner(tokens)}</del>`,
  codespan: ({text}) => html`<code>${text}</code>`,
  link: ({href, tokens}, inner) => link(href, inner(tokens)),
  image: ({href, text}) => link(href, text || href),
  checkbox: ({checked}) => `${checked ? '☑' : '☐'} `,
  paragraph: ({tokens}, inner) => html`<p>${inner(tokens)}</p>`,
  heading: ({depth, tokens}, inner) => html`<${`h${depth}`}>${inner(tokens)}<//>`,
  blockquote: ({tokens}, inner) => html`<blockquote>${inner(tokens)}</blockquote>`,
  list: ({ordered, start, items}, inner) => html`<${ordered ? 'ol' : 'ul'} start=${ordered ? start : undefined}>
    ${items.map(({tokens}) => html`<li>${inner(tokens)}</li>`)}<//>`,
  code: ({text, lang}, _inner, isWhole) => html`<${Code} text=${text} lang=${lang} isWhole=${isWhole} />`,
  table({header, rows}, inner) {
    const row = (name, cells) => html`<tr>${cells.map(({align, tokens}) =>
      html`<${name} style=${{textAlign: align}}>${inner(tokens)}<//>`)}</tr>`;
    return html`<div class="code-table" tabindex="0"><table><thead>${row('th', header)}</thead>
      <tbody>${rows.map((cells) => row('td', cells))}</tbody></table></div>`;
  },
};

function elements(tokens, isWhole, depth = 0) {
  if (depth > DEEPEST) return tokens.map(({raw}) => raw);
  return tokens.map((token) =>
    ELEMENTS[token.type](token, (inner) => elements(inner, isWhole, depth + 1), isWhole));
}

const marked = new Marked({gfm: true, breaks: true});

/** The blocks of a text. One that is nested too deep to be read is a single block of text. */
function blocksOf(text) {
  try {
    return marked.lexer(text).filter(({type}) => type !== 'space');
  } catch {
    return [{type: 'html', block: true, text, raw: text}];
  }
}

export function Markdown({text, streaming = false}) {
  const known = useRef(new Map()); // elements of the blocks that were shown last
  const blocks = blocksOf(text);
  const now = new Map();
  const parts = blocks.map((token, i) => {
    const isWhole = !streaming || i < blocks.length - 1;
    const name = `${i} ${isWhole}${token.raw}`;
    now.set(name, known.current.get(name) ?? html`<div key=${i}>${elements([token], isWhole)}</div>`);
    return now.get(name);
  });
  known.current = now;
  return html`<div class="markdown">${parts}</div>`;
}
