// What varies: the values of settings, and their product with the prompts. No DOM.

export const MAX_CELLS = 64;

/**
 * The numbers of '0, 0.7, 1', '1..4' (whole numbers) or '0..1.5 x 4' (evenly spaced). Throws an `Error` that says what
 * is wrong.
 */
export function parseValues(source) {
  const values = source.split(',').map((part) => part.trim()).filter(Boolean).flatMap(parsePart);
  if (!values.length) throw new Error('Write values, like 0, 0.7, or a range, like 0..1.5 x 4');
  const twice = values.find((value, i) => values.indexOf(value) !== i);
  if (twice !== undefined) throw new Error(`${twice} is there twice`);
  return values;
}

function parsePart(part) {
  const range = /^(.+?)\s*\.\.\s*(.+?)(?:\s*[x×*]\s*(\S+))?$/.exec(part);
  if (!range) return [toNumber(part)];
  const [low, high] = [toNumber(range[1]), toNumber(range[2])];
  if (range[3]) {
    const n = toNumber(range[3]);
    if (!Number.isInteger(n) || n < 2) throw new Error(`${part}: the number of values must be 2 or more`);
    return spaced(low, high, n);
  }
  if (!Number.isInteger(low) || !Number.isInteger(high)) throw new Error(`Say how many values: ${part} x 4`);
  if (high < low) throw new Error(`${part} is empty: write the smaller number first`);
  return spaced(low, high, high - low + 1);
}

function spaced(low, high, n) {
  if (n > MAX_CELLS) throw new Error(`${low}..${high} has ${n} values; there are ${MAX_CELLS} cells at most`);
  const step = (high - low) / Math.max(1, n - 1);
  return Array.from({length: n}, (_, i) => Number((low + i * step).toFixed(6)));
}

function toNumber(text) {
  const number = Number(text);
  if (!Number.isFinite(number)) throw new Error(`${text} is not a number`);
  return number;
}

/**
 * All combinations of the values ([name, values] each), the last setting varying fastest, and `n` samples of each. The
 * samples have consecutive seeds if there is a seed, as with the server's `n`.
 */
export function combinations(varied, n, seed) {
  const all = varied.reduce(
    (params, [name, values]) => params.flatMap((each) => values.map((value) => ({...each, [name]: value}))), [{}],
  );
  if (n === 1) return all;
  return all.flatMap((each) => Array.from({length: n}, (_, i) => {
    const first = each.seed ?? seed;
    return first === undefined ? each : {...each, seed: first + i};
  }));
}

/** Throws an `Error` if there are more than `MAX_CELLS`. */
export function checkProduct(nPrompts, varied, n) {
  const counts = [[nPrompts, 'prompts'], ...varied.map(([name, values]) => [values.length, name]), [n, 'samples']];
  const factors = counts.filter(([count]) => count > 1);
  const product = factors.reduce((all, [count]) => all * count, 1);
  if (product <= MAX_CELLS) return;
  const text = factors.map((each) => each.join(' ')).join(' x ') + (factors.length > 1 ? ` = ${product} cells` : '');
  throw new Error(`${text}: there are ${MAX_CELLS} cells at most. Take fewer values, rows or samples`);
}
