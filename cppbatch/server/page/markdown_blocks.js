// @ts-check
// The blocks of a Markdown text, in a bounded time whatever the text is. No DOM.
//
// marked's rules for emphasis, links, lists and quotations take a time that grows with the square or the cube of a text.
// So they get one block at a time, from a window of the text, and a budget for it. Text beyond the budget stays as it is.
import {Lexer, Tokenizer} from './vendor/marked.js';

const WINDOW = 20_000; // characters of a block, and
const LINES = 500; // its lines: what follows is another block. Fenced code has neither bound
const BUDGET = 2e6; // of a block: the sum of characters times marks, over its texts and the texts within them
const CELLS = 5000; // of a table
const DEEPEST = 20; // levels of quotations, lists and emphasis
const DEFINITIONS = 100; // of link targets and footnotes; more are text
const MARKS = /[*_~`[\]<!\\@&:$]/g;
const FORMULA = /^(?:\$\$([^$]{1,1000})\$\$|\\\[([^]{1,1000}?)\\\]|\\\(([^]{1,500}?)\\\)|\$(?!\s)([^$\n]{1,500})(?<!\s)\$(?!\d))/;
const NOTE = /^ {0,3}\[\^([^\s\]]{1,40})\]:[ \t]*([^\n]*(?:\n(?!\s*$|\s*\n| {0,3}(?:\[\^|[-*+#>`~|]|\d+[.)]))[^\n]+)*)(?:\n|$)/;
const MARK = /^\[(\^[^\s\]]{1,40})\]/;
const LONG = /\S{1000}|[ \t]{100}/; // in a paragraph: on these the rules for addresses and line breaks are slow
const WINDOW_LINES = new RegExp(`^(?:[^\n]*\n){${LINES}}`);
const EMPTY_LINES = /(?:[ \t]*\n)*/y;
const ENDED = new Error('The block has ended.');
const TOO_COSTLY = new Error('The block is nested too deep or too long.');

const plain = (raw) => ({type: 'plain', raw, text: raw});

class Rules extends Tokenizer {
  /** Comes first at each place where a block begins. */
  space(src) {
    const {depth, tokens} = this.lexer;
    if (depth === 1 && tokens.length) {
      this.lexer.rest = src.length;
      throw ENDED;
    }
    return super.space(src);
  }

  def(src) {
    const {depth, tokens} = this.lexer;
    if (Object.keys(tokens.links).length >= DEFINITIONS) return undefined;
    const isPart = depth > 1 || ['paragraph', 'text'].includes(tokens.at(-1)?.type);
    const [raw, name, text] = (!isPart && NOTE.exec(src)) || [];
    return raw ? {type: 'footnote', raw, tag: `^${name}`, name, text, tokens: this.lexer.inline(text.replace(/\n[ \t]+/g, '\n'))} : super.def(src);
  }

  /** [^1], if the text has such a footnote. */
  reflink(src, links) {
    const [raw, tag] = MARK.exec(src) ?? [];
    return raw && tag in links ? {type: 'mark', raw, name: tag.slice(1)} : super.reflink(src, links);
  }

  table(src) {
    const found = this.rules.block.table.exec(src);
    const cells = found && found[2].split('|').length * (found[3] ?? '').split('\n').length;
    return cells > CELLS ? plain(found[0]) : found && super.table(src);
  }
}

/** $x$, $$x$$, \(x\) and \[x\]; not the prices $5 and $6. */
function formula(src) {
  const found = /^[$\\]/.test(src) && FORMULA.exec(src);
  if (!found) return undefined;
  const [raw, ...texts] = found;
  const at = texts.findIndex((text) => text !== undefined);
  return {type: 'formula', raw, text: texts[at], display: at < 2};
}

const FORMULAS = {inline: [formula], startInline: [(src) => src.indexOf('$')], childTokens: {}, renderers: {}};

class BlockLexer extends Lexer {
  depth = 0;
  budget = BUDGET;
  rest = 0; // characters after the block

  constructor(links) {
    super({gfm: true, breaks: true, tokenizer: new Rules(), extensions: FORMULAS});
    this.tokens.links = links;
  }

  /** Takes a cost from the budget. Whether the text may be read. */
  #pay(cost) {
    this.budget -= cost;
    return this.budget >= 0 && this.depth < DEEPEST;
  }

  blockTokens(src, tokens = [], last = false) {
    if (!this.#pay(src.length)) throw TOO_COSTLY;
    this.depth++;
    super.blockTokens(src, tokens, last);
    this.depth--;
    return tokens;
  }

  inlineTokens(src, tokens = []) {
    if (LONG.test(src) || !this.#pay(src.length * (1 + (src.match(MARKS)?.length ?? 0)))) {
      tokens.push(plain(src));
      return tokens;
    }
    this.depth++;
    super.inlineTokens(src, tokens);
    this.depth--;
    return tokens;
  }
}

function windowOf(text) {
  if (/^ {0,3}(```|~~~)/.test(text)) return text;
  const part = text.slice(0, WINDOW);
  return WINDOW_LINES.exec(part)?.[0]
    ?? (text.length > WINDOW ? part.slice(0, part.lastIndexOf('\n') + 1) || part : part);
}

/** The block at the start of a text, which does not begin with an empty line. */
class Block {
  isWhole = true; // false: the text that follows may belong to it
  #lexer;
  #tokens = [];

  constructor(text, start, links) {
    const part = windowOf(text);
    this.#lexer = new BlockLexer(links);
    try {
      this.#lexer.blockTokens(part, this.#lexer.tokens);
    } catch (error) {
      if (error !== ENDED) this.#giveUp(part); // too costly, or a browser's own limit of recursion
    }
    this.raw = part.slice(0, part.length - this.#lexer.rest);
    this.start = start;
    this.end = start + this.raw.length;
  }

  /** The text to the next empty line, as it is. */
  #giveUp(part) {
    const [raw] = /^(?:[^\n]+\n?)+/.exec(part) ?? [part];
    Object.assign(this.#lexer, {tokens: [plain(raw)], inlineQueue: [], rest: part.length - raw.length});
  }

  /** Its tokens. What is in its paragraphs is read now: all targets of links are known. */
  get tokens() {
    if (this.#lexer) {
      this.#lexer.inlineQueue.forEach(({src, tokens}) => this.#lexer.inlineTokens(src, tokens));
      this.#tokens = this.#lexer.tokens;
      this.#lexer = null;
    }
    return this.#tokens;
  }
}

/** The blocks of a text that grows. Those that are finished are not read again. */
export class MarkdownBlocks {
  all = [];
  #text = '';
  #isWhole = false;
  #isRead = false;
  #links = Object.create(null);
  #before = new Map(); // blocks that are read again, by their start

  /** Reads on while `hasTime()`. isWhole: nothing will follow. Returns whether all is read. */
  read(source, isWhole, hasTime) {
    const text = source.replace(/\r\n?/g, '\n');
    if (text !== this.#text || isWhole !== this.#isWhole) {
      this.#reopen(text, isWhole);
      [this.#text, this.#isWhole, this.#isRead] = [text, isWhole, false];
    }
    while (!this.#isRead && hasTime()) this.#readBlock();
    return this.#isRead;
  }

  /** Takes away the blocks that further text can change: those that no whole line follows. */
  #reopen(text, isWhole) {
    this.#before.clear();
    const isNew = !text.startsWith(this.#text) || (isWhole && Object.keys(this.#links).length > 0); // links of all blocks
    if (isNew) [this.all, this.#links] = [[], Object.create(null)];
    while (this.all.length && !this.#text.slice(this.all.at(-1).end).trimStart().includes('\n')) {
      const block = this.all.pop();
      this.#before.set(block.start, block);
      for (const {type, tag} of block.tokens) if (type === 'def' || type === 'footnote') delete this.#links[tag];
    }
  }

  #readBlock() {
    const last = this.all.at(-1);
    EMPTY_LINES.lastIndex = last?.end ?? 0;
    EMPTY_LINES.exec(this.#text);
    const start = EMPTY_LINES.lastIndex;
    const text = this.#text.slice(start);
    this.#isRead = !text.trimStart();
    if (this.#isRead) return;
    if (last) last.isWhole = true;
    const block = new Block(text, start, this.#links);
    const before = this.#before.get(start);
    this.all.push(before?.raw === block.raw ? before : block);
    this.all.at(-1).isWhole = this.#isWhole;
  }
}
