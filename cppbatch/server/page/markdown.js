// @ts-check
// Markdown that a model wrote, as safe HTML.
//
//   Markdown {text, streaming}   only blocks that have changed are rendered again; code is highlighted when it is whole
//   markdownToHtml(text)         the same as a string
//
// HTML in the text is shown as text, and images as links: the page loads nothing from elsewhere. What marked returns
// goes through DOMPurify all the same.
import {copyText, html, useEffect, useReducer, useRef} from './components.js';
import {Marked, Renderer} from './vendor/marked.js';
import './vendor/purify.js';

const CLASSES = /^(code(-\w+)?|copy-code)$/;
const LONGEST = 50_000; // characters of code that are highlighted
const LANGUAGES = new Set('bash c diff go java js json py rs todo toml xml yaml'.split(' '));
const ALIASES = {
  sh: 'bash', shell: 'bash', zsh: 'bash', console: 'bash', h: 'c', 'c++': 'c', cpp: 'c', cc: 'c', patch: 'diff',
  golang: 'go', javascript: 'js', jsx: 'js', ts: 'js', typescript: 'js', tsx: 'js', python: 'py', python3: 'py',
  rust: 'rs', html: 'xml', svg: 'xml', yml: 'yaml',
};

const purify = globalThis.DOMPurify;
purify.addHook('uponSanitizeAttribute', (_node, data) => {
  if (data.attrName === 'class' && !CLASSES.test(data.attrValue)) data.keepAttr = false;
});
purify.addHook('afterSanitizeAttributes', (node) => {
  if (node.tagName === 'A') {
    node.setAttribute('target', '_blank');
    node.setAttribute('rel', 'noopener noreferrer nofollow');
  }
});
const SAFE = {
  ALLOWED_TAGS: ('p br hr h1 h2 h3 h4 h5 h6 ul ol li blockquote pre code em strong del a table thead tbody tr th td '
    + 'span div button').split(' '),
  ALLOWED_ATTR: ['href', 'title', 'class', 'align', 'start', 'type', 'tabindex'],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ADD_URI_SAFE_ATTR: ['align', 'start', 'type', 'tabindex'],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
};

const ENTITIES = {'&': '&amp;', '<': '&lt;', '>': '&gt;', '"': '&quot;'};
const escape = (text) => text.replace(/[&<>"]/g, (character) => ENTITIES[character]);

let tokenizer = null;
const grammars = {}; // by language; undefined: not loaded
const wanted = new Set();
const listeners = new Set();

/** Loads the grammar of a language; Markdown that is shown is then rendered again. */
async function load(language) {
  if (wanted.has(language)) return;
  wanted.add(language);
  const file = (name) => import(`./vendor/highlight/${name}.js`);
  [{tokenizer}, {default: grammars[language]}] = await Promise.all([file('tokenize'), file(language)]);
  listeners.forEach((listener) => listener());
}

/** Code as HTML. Grammars of languages within the language (CSS in HTML) are loaded when they are met. */
function highlighted(code, name) {
  const language = ALIASES[name] ?? name;
  if (!LANGUAGES.has(language) || code.length > LONGEST) return escape(code);
  if (!grammars[language]) {
    load(language);
    return escape(code);
  }
  let out = '';
  const steps = tokenizer(code, grammars[language], (text, type) => {
    out += type ? `<span class="code-${type}">${escape(text)}</span>` : escape(text);
  });
  for (let step = steps.next(); !step.done; step = steps.next(grammars[step.value])) {
    if (LANGUAGES.has(step.value)) load(step.value);
  }
  return out;
}

let isWhole = true;
const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({text}) => escape(text),
    image: ({href, text}) => `<a href="${escape(href)}">${escape(text || href)}</a>`,
    table(token) {
      return `<div class="code-table" tabindex="0">${Renderer.prototype.table.call(this, token)}</div>`;
    },
    checkbox: ({checked}) => `${checked ? '☑' : '☐'} `,
    code({text, lang}) {
      const name = (lang ?? '').split(/\s/)[0].toLowerCase();
      const code = isWhole ? highlighted(text, name) : escape(text);
      return `<div class="code"><div class="code-head"><span>${escape(name) || 'text'}</span>`
        + '<button type="button" class="copy-code">Copy</button></div>'
        + `<pre tabindex="0"><code>${code}</code></pre></div>`;
    },
  },
});

function render(tokens, whole) {
  isWhole = whole;
  return purify.sanitize(marked.parser(tokens), SAFE);
}

export const markdownToHtml = (text) => render(marked.lexer(text), true);

async function copyCode(event) {
  const button = event.target.closest('.copy-code');
  if (!button) return;
  await copyText(button.closest('.code').querySelector('code').textContent);
  button.textContent = 'Copied';
  setTimeout(() => { button.textContent = 'Copy'; }, 1500);
}

export function Markdown({text, streaming = false}) {
  const known = useRef(new Map());
  const [version, update] = useReducer((n) => n + 1, 0);
  useEffect(() => {
    const forget = () => {
      known.current = new Map();
      update();
    };
    listeners.add(forget);
    return () => listeners.delete(forget);
  }, []);
  const blocks = marked.lexer(text).filter((token) => token.type !== 'space');
  const now = new Map();
  const parts = blocks.map((token, i) => {
    const whole = !streaming || i < blocks.length - 1;
    const name = `${whole}${token.raw}`;
    const part = known.current.get(name) ?? render([token], whole);
    now.set(name, part);
    return part;
  });
  known.current = now;
  return html`<div class="markdown" data-version=${version} onClick=${copyCode}>
    ${parts.map((part, i) => html`<div key=${i} dangerouslySetInnerHTML=${{__html: part}} />`)}</div>`;
}
