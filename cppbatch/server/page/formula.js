// @ts-check
// Formulas in the part of TeX that models write, as MathML. What is not known is shown as it was written.
//
//   Formula {tex, display}   display: on a line of its own
import {html, useLayoutEffect, useRef} from './components.js';

const MATHML = 'http://www.w3.org/1998/Math/MathML';
const DEEPEST = 40;
const TOKENS = /\\[a-zA-Z]+\*?|\\[^]|\d+(?:[.,]\d+)*|\s+|[^]/gu;
/** Names with their characters: identifiers, then operators. */
const [LETTERS, OPERATORS] = [
  'alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ lambda λ mu μ nu ν '
  + 'xi ξ pi π rho ρ sigma σ tau τ upsilon υ phi ϕ varphi φ chi χ psi ψ omega ω Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π '
  + 'Sigma Σ Phi Φ Psi Ψ Omega Ω infty ∞ partial ∂ nabla ∇ ell ℓ hbar ℏ emptyset ∅ ldots … dots … cdots ⋯ vdots ⋮ ddots ⋱',
  'times × div ÷ cdot · pm ± mp ∓ leq ≤ le ≤ geq ≥ ge ≥ neq ≠ ne ≠ approx ≈ equiv ≡ sim ∼ simeq ≃ cong ≅ propto ∝ ll ≪ gg ≫ in ∈ '
  + 'notin ∉ ni ∋ subset ⊂ subseteq ⊆ supset ⊃ supseteq ⊇ cup ∪ cap ∩ setminus ∖ forall ∀ exists ∃ neg ¬ lnot ¬ land ∧ wedge ∧ '
  + 'lor ∨ vee ∨ oplus ⊕ otimes ⊗ circ ∘ bullet • star ⋆ ast ∗ to → rightarrow → leftarrow ← leftrightarrow ↔ Rightarrow ⇒ '
  + 'Leftarrow ⇐ implies ⟹ iff ⟺ Leftrightarrow ⇔ mapsto ↦ langle ⟨ rangle ⟩ lfloor ⌊ rfloor ⌋ lceil ⌈ rceil ⌉ mid ∣ parallel ∥ '
  + 'perp ⊥ angle ∠ sum ∑ prod ∏ int ∫ iint ∬ oint ∮ bigcup ⋃ bigcap ⋂ prime ′ colon : lbrace { rbrace } vert | Vert ‖',
].map((names) => new Map(names.match(/\S+ \S+/g).map((pair) => /** @type {[string, string]} */ (pair.split(' ')))));
const ACCENTS = {hat: '^', widehat: '^', bar: '¯', overline: '¯', vec: '→', dot: '˙', ddot: '¨', tilde: '~', widetilde: '~'};
const FENCES = {pmatrix: '()', bmatrix: '[]', vmatrix: '||', cases: '{'};
const FUNCTIONS = /^(arg|arc(sin|cos|tan)|cosh?|det|dim|exp|gcd|inf|ker|lim|ln|log|max|min|Pr|sinh?|sup|tanh?)$/;
const STACKED = /^[∑∏⋃⋂]$|^(lim|max|min|sup|inf)$/; // with their bounds below and above
const TEXT = /^(text(bf|it|rm)?|mbox|math(rm|bf|it|sf|cal|bb|frak)|operatorname\*?|boldsymbol)$/;
const SPACES = {',': '0.17em', ':': '0.22em', ';': '0.28em', '!': '0', ' ': '0.3em', quad: '1em', qquad: '2em'};

function element(name, children = [], attributes = {}) {
  const made = document.createElementNS(MATHML, name);
  Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
  made.append(...children);
  return made;
}

class Reader {
  at = 0;
  depth = 0;

  constructor(tex, display) {
    this.tokens = tex.match(TOKENS) ?? [];
    this.display = display;
  }

  peek() {
    while (/^\s/.test(this.tokens[this.at] ?? '')) this.at++;
    return this.tokens[this.at];
  }

  /** What comes before one of these tokens, which is taken too. */
  row(...ends) {
    const parts = [];
    if (++this.depth > DEEPEST) this.at = this.tokens.length;
    for (let next = this.peek(); next !== undefined && !ends.includes(next); next = this.peek()) parts.push(this.scripted());
    this.at++;
    this.depth--;
    return element('mrow', parts);
  }

  scripted() {
    let [base, below, above] = [this.atom(), null, null];
    const stacked = this.display && STACKED.test(base.textContent ?? '');
    for (let mark = this.peek(); mark === '^' || mark === '_' || mark === '\''; mark = this.peek()) {
      this.at++;
      if (mark === '_') below = this.argument();
      else above = mark === '^' ? this.argument() : element('mo', ['′']);
    }
    const name = `${stacked ? 'm' : 'ms'}${below ? (stacked ? 'under' : 'ub') : ''}${
      above ? (stacked ? 'over' : below ? 'sup' : 'up') : ''}`;
    return below || above ? element(name, [base, below, above].filter(Boolean)) : base;
  }

  argument() {
    if (this.peek() !== '{') return this.atom();
    this.at++;
    return this.row('}');
  }

  /** The text in the braces that follow. */
  raw() {
    if (this.peek() !== '{') return this.tokens[this.at++] ?? '';
    const end = this.tokens.indexOf('}', this.at);
    const text = this.tokens.slice(this.at + 1, end < 0 ? undefined : end).join('');
    this.at = end < 0 ? this.tokens.length : end + 1;
    return text;
  }

  atom() {
    if (++this.depth > DEEPEST) this.at = this.tokens.length;
    const token = this.peek() ?? '';
    this.at++;
    const made = token[0] === '\\' ? this.command(token.slice(1)) : this.character(token);
    this.depth--;
    return made;
  }

  character(token) {
    if (token === '{') return this.row('}');
    if (/^\d/.test(token)) return element('mn', [token]);
    return element(/^\p{L}/u.test(token) ? 'mi' : 'mo', [token === '-' ? '−' : token === '~' ? '\u00a0' : token]);
  }

  command(name) {
    if (LETTERS.has(name)) return element('mi', [LETTERS.get(name)]);
    if (OPERATORS.has(name)) return element('mo', [OPERATORS.get(name)]);
    if (FUNCTIONS.test(name)) return element('mi', [name]);
    if (TEXT.test(name)) return element(/^(text|mbox)/.test(name) ? 'mtext' : 'mi', [this.raw()], {mathvariant: 'normal'});
    if (/^[dt]?frac$/.test(name)) return element('mfrac', [this.argument(), this.argument()]);
    if (name === 'binom') {
      const pair = element('mfrac', [this.argument(), this.argument()], {linethickness: '0'});
      return element('mrow', [element('mo', ['(']), pair, element('mo', [')'])]);
    }
    if (name === 'sqrt') {
      if (this.peek() !== '[') return element('msqrt', [this.argument()]);
      this.at++;
      const degree = this.row(']');
      return element('mroot', [this.argument(), degree]);
    }
    if (Object.hasOwn(ACCENTS, name)) return element('mover', [this.argument(), element('mo', [ACCENTS[name]])], {accent: 'true'});
    if (Object.hasOwn(SPACES, name)) return element('mspace', [], {width: SPACES[name]});
    if (/^(left|right|[bB]igg?[lr]?)$/.test(name)) {
      const fence = this.atom();
      return fence.textContent === '.' ? element('mrow') : fence;
    }
    if (name === 'begin') return this.table(this.raw());
    if (name === '\\') return element('mspace', [], {linebreak: 'newline'});
    if (/^[^a-zA-Z]$/.test(name)) return element('mo', [name]);
    return element('mtext', [`\\${name}`]);
  }

  table(name) {
    const rows = [[[]]];
    for (let next = this.peek(); next !== undefined && next !== '\\end'; next = this.peek()) {
      if (next === '&') rows.at(-1)?.push([]);
      else if (next === '\\\\') rows.push([[]]);
      else rows.at(-1)?.at(-1)?.push(this.scripted());
      if (next === '&' || next === '\\\\') this.at++;
    }
    this.at++;
    this.raw();
    const cells = rows.filter((row) => row.some((cell) => cell.length))
      .map((row) => element('mtr', row.map((cell) => element('mtd', cell))));
    const [open, close] = Object.hasOwn(FENCES, name) ? FENCES[name] : '';
    const [before, after] = [open, close].map((fence) => (fence ? [element('mo', [fence])] : []));
    return element('mrow', [...before, element('mtable', cells), ...after]);
  }
}

export function Formula({tex, display}) {
  const place = useRef(null);
  useLayoutEffect(() => {
    let shown = tex;
    try {
      shown = element('math', [new Reader(tex, display).row()], {display: display ? 'block' : 'inline'});
    } catch (error) { // one that passed on would stop the whole page
      console.error(error);
    }
    place.current.replaceChildren(shown);
  }, [tex, display]);
  return html`<span class=${display ? 'formula' : ''} ref=${place}></span>`;
}
