// @ts-check
// Code with its colours, by highlight.js: its core and the grammar of a language are loaded when code of it is shown.
//
//   languageOf(name) -> the grammar for the name after ```, undefined: there is none
//   load(language), onLoad(listener) -> unsubscribe
//   isLoaded(language)
//   Highlighter(code, language)   read(hasTime) -> whether all is read; elements
import {html} from './components.js';

const MOST = 5000; // parts; what follows is one more
const PIECE = 3000; // characters: some grammars take a time that grows with the square
const PIECES = new RegExp(`[^]{1,${PIECE}}(?=\n\n|$)|[^]{1,${PIECE}}(?=\n|$)|[^]{1,${PIECE}}`, 'g');
/** Grammars, each with the other names of its language. */
const NAMES = new Map(Object.entries({
  apache: 'apacheconf', bash: 'sh zsh', c: 'h', clojure: 'clj', cmake: '', cpp: 'c++ cc cxx hpp hxx cuda cu arduino ino glsl',
  csharp: 'cs c#', css: '', dart: '', delphi: 'pascal pas', diff: 'patch', dockerfile: 'docker containerfile',
  elixir: 'ex exs', erlang: 'erl', fortran: 'f90 f95', go: 'golang', graphql: 'gql', groovy: 'gradle', haskell: 'hs',
  http: 'https', ini: 'toml cfg conf properties', java: '', javascript: 'js jsx mjs cjs', json: 'json5 jsonc jsonl ndjson',
  julia: 'jl', kotlin: 'kt kts', latex: 'tex', lisp: 'elisp common-lisp', lua: '', makefile: 'make mk', markdown: 'md mdx',
  matlab: 'octave', nginx: '', nix: '', objectivec: 'objc objective-c obj-c mm', ocaml: 'ml fsharp f# fs', perl: 'pl pm',
  php: '', powershell: 'ps1 pwsh ps', protobuf: 'proto', python: 'py python3 py3 gyp', r: 'rscript', ruby: 'rb',
  rust: 'rs', scala: '', scss: 'sass less', shell: 'console shell-session terminal', sql:
  'sqlite mysql mariadb postgres postgresql psql plsql tsql', swift: '', typescript: 'ts tsx mts', vbnet: 'vb basic vba',
  verilog: 'v sv systemverilog', vhdl: '', xml: 'html svg xhtml vue svelte rss plist', yaml: 'yml',
}).flatMap(([name, others]) => [name, ...others.split(' ').filter(Boolean)].map((each) => [each, name])));
const INNER = {xml: ['css', 'javascript'], php: ['xml', 'css', 'javascript'], markdown: ['xml'], shell: ['bash']};

/** The classes of style.css for highlight.js's scopes, by their first word. */
const CLASSES = {
  keyword: 'kwd', 'selector-tag': 'kwd', 'template-tag': 'kwd', built_in: 'type', type: 'type', 'char.escape': 'esc',
  subst: '', string: 'str', regexp: 'str', addition: 'insert', code: 'str', link: 'str', number: 'num', literal: 'bool', symbol: 'bool',
  section: 'section', meta: 'section', title: 'func', name: 'class', tag: '', attr: 'var', attribute: 'var', property: 'var',
  variable: 'var', 'template-variable': 'var', bullet: 'num', 'selector-class': 'class', 'selector-id': 'class',
  'selector-attr': 'var', 'selector-pseudo': 'var', deletion: 'deleted', comment: 'cmnt', quote: 'cmnt', doctag: 'kwd',
};

let core = null;
const loading = new Map();
const listeners = new Set();

export const languageOf = (name) => NAMES.get(name);

export function onLoad(listener) {
  listeners.add(listener);
  return () => { listeners.delete(listener); };
}

const grammar = async (name) => (await import(`./vendor/highlight/${name}.js`)).default;

/** Those that listen are told when it is there. */
export function load(language) {
  if (loading.has(language)) return;
  const all = [language, ...INNER[language] ?? []];
  loading.set(language, Promise.all([grammar('core'), ...all.map(grammar)]).then(([hljs, ...grammars]) => {
    core ??= hljs.newInstance();
    all.forEach((name, i) => core.registerLanguage(name, grammars[i]));
    listeners.forEach((listener) => listener());
  }));
}

const classOf = (scope) => CLASSES[scope] ?? CLASSES[scope.split('.')[0]] ?? '';

export const isLoaded = (language) => Boolean(core?.getLanguage(language));

/** Reads code piece by piece, while there is time. */
export class Highlighter {
  #parts = [];
  #length = 0;

  constructor(code, language) {
    Object.assign(this, {code, language});
    this.pieces = code.match(PIECES) ?? [];
  }

  read(hasTime) {
    while (this.pieces.length && hasTime()) {
      const options = {language: this.language, ignoreIllegals: true};
      this.#walk(core.highlight(this.pieces.shift(), options)._emitter.root, ''); // a tree: no HTML is made of it
    }
    return !this.pieces.length;
  }

  #walk({scope, children}, outer) {
    const name = scope ? classOf(scope) : outer;
    for (const child of children) {
      if (typeof child !== 'string') this.#walk(child, name);
      else if (this.#parts.length < MOST) {
        this.#parts.push(name ? html`<span class=${`code-${name}`}>${child}</span>` : child);
        this.#length += child.length;
      }
    }
  }

  get elements() {
    return [...this.#parts, this.code.slice(this.#length)];
  }
}
