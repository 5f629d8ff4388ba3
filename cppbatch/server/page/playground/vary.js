// What varies: the values of settings, and their product with the prompts. No DOM.

export const MAX_CELLS = 64;

/** The numbers of '0, 0.7, 1', '1..4' (whole numbers) or '0..1.5 x 4' (evenly spaced). Throws an `Error`. */
export function parseValues(source) {
  const values = source.split(',').map((part) => part.trim()).filter(Boolean).flatMap(parsePart);
  const twice = values.find((value, i) => values.indexOf(value) !== i);
  if (twice !== undefined) throw new Error(`${twice} occurs twice`);
  return values;
}

function parsePart(part) {
  const [, from, to, count] = /^(.+?)\s*\.\.\s*(.+?)(?:\s*[x×*]\s*(\S+))?$/.exec(part) ?? [];
  if (from === undefined) return [toNumber(part)];
  const [low, high] = [toNumber(from), toNumber(to)];
  if (!count && !(Number.isInteger(low) && Number.isInteger(high))) throw new Error(`Give the number of values: ${part} x 4`);
  const n = count ? toNumber(count) : high - low + 1;
  if (!(Number.isInteger(n) && n > 0 && n <= MAX_CELLS)) throw new Error(`${part} has ${n} values; use 1 to ${MAX_CELLS}`);
  const step = (high - low) / Math.max(1, n - 1);
  return Array.from({length: n}, (_, i) => Number((low + i * step).toFixed(4)));
}

function toNumber(text) {
  const number = Number(text);
  if (!Number.isFinite(number)) throw new Error(`${text} is not a number; use values like 0, 0.7 or 0..1.5 x 4`);
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
  const sample = (each, first, i) => (n === 1 || first === undefined ? each : {...each, seed: first + i});
  return all.flatMap((each) => Array.from({length: n}, (_, i) => sample(each, each.seed ?? seed, i)));
}

/** Throws an `Error` if the product of [count, name] each is more than `MAX_CELLS`. */
export function checkProduct(counts) {
  const factors = counts.filter(([count]) => count > 1);
  const product = factors.reduce((all, [count]) => all * count, 1);
  if (product <= MAX_CELLS) return;
  const text = factors.map((each) => each.join(' ')).join(' x ') + (factors.length > 1 ? ` = ${product} cells` : '');
  throw new Error(`${text}: the limit is ${MAX_CELLS} cells. Use fewer values, rows or samples`);
}
