// The differences between two texts, word by word. No DOM.

const MAX_EDITS = 500; // time and memory grow with the square of their number

/**
 * The shortest edit from one text to the other (Myers' greedy algorithm), as [{kind: 'same' | 'removed' | 'added',
 * text}]. Where more than 500 words and spaces differ, all between the first and the last difference is one edit.
 */
export function wordDiff(from, to) {
  const [a, b] = [words(from), words(to)];
  let start = 0;
  while (start < a.length && a[start] === b[start]) start++;
  let end = 0;
  while (end < Math.min(a.length, b.length) - start && a.at(-1 - end) === b.at(-1 - end)) end++;
  const same = (all) => all.map((text) => ({kind: 'same', text}));
  const [mineA, mineB] = [a.slice(start, a.length - end), b.slice(start, b.length - end)];
  return joined([...same(a.slice(0, start)), ...edits(mineA, mineB), ...same(a.slice(a.length - end))]);
}

/** Words, spaces, and single punctuation marks. */
const words = (text) => text.match(/[\p{L}\p{N}_'’]+|\s+|[^\p{L}\p{N}_'’\s]/gu) ?? [];

function edits(a, b) {
  const trace = search(a, b);
  if (!trace) return [{kind: 'removed', text: a.join('')}, {kind: 'added', text: b.join('')}];
  const found = [];
  let [x, y] = [a.length, b.length];
  for (let d = trace.length - 1; d >= 0; d--) {
    const [before, isAdded] = reached(trace[d], d, x - y);
    for (; x > before; y--) found.push({kind: 'same', text: a[--x]});
    if (d > 0) found.push(isAdded ? {kind: 'added', text: b[--y]} : {kind: 'removed', text: a[--x]});
  }
  return found.reverse();
}

/** For each number of edits d, the furthest x with d - 1 edits on the diagonals x - y = k, at k + d + 1. */
function search(a, b) {
  const trace = [new Int32Array(3)];
  for (let d = 0; d <= MAX_EDITS; d++) {
    const next = new Int32Array(2 * d + 5);
    for (let k = -d; k <= d; k += 2) {
      let [x] = reached(trace[d], d, k);
      while (x < a.length && x - k < b.length && a[x] === b[x - k]) x++;
      next[k + d + 2] = x;
      if (x >= a.length && x - k >= b.length) return trace;
    }
    trace.push(next);
  }
  return null;
}

/** The x on diagonal k right behind the d-th edit, and whether that edit adds a word. */
function reached(points, d, k) {
  if (d === 0) return [0, false];
  const [below, above] = [points[k + d], points[k + d + 2]];
  const isAdded = k === -d || (k !== d && below < above);
  return [isAdded ? above : below + 1, isAdded];
}

/** Neighbours of one kind as one part, what was removed before what was added; a single space between edits joins them. */
function joined(parts) {
  const result = [];
  const put = (kind, text) => {
    if (text && result.at(-1)?.kind === kind) result.at(-1).text += text;
    else if (text) result.push({kind, text});
  };
  let [removed, added] = ['', ''];
  parts.forEach(({kind, text}, i) => {
    const isBetween = kind === 'same' && text.trim() === '' && removed && added && parts[i + 1]?.kind !== 'same';
    if (kind === 'removed' || isBetween) removed += text;
    if (kind === 'added' || isBetween) added += text;
    if (kind !== 'same' || isBetween) return;
    put('removed', removed);
    put('added', added);
    put('same', text);
    removed = added = '';
  });
  put('removed', removed);
  put('added', added);
  return result;
}
