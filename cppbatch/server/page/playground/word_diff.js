// The differences between two texts, word by word. No DOM.

const MAX_PAIRS = 2e6; // bounds time and memory: 1,400 words and spaces on each side

/**
 * The parts of two texts: [{kind: 'same' | 'removed' | 'added', text}], with their longest common subsequence of words.
 * In longer texts all between the first and the last difference is removed and added.
 */
export function wordDiff(from, to) {
  const [a, b] = [from, to].map((text) => text.match(/[\p{L}\p{N}_'’]+|\s+|[^\p{L}\p{N}_'’\s]/gu) ?? []);
  let begin = 0;
  while (begin < a.length && a[begin] === b[begin]) begin++;
  let end = 0;
  while (end < Math.min(a.length, b.length) - begin && a.at(-1 - end) === b.at(-1 - end)) end++;
  const [n, m] = [a.length - end, b.length - end];
  const parts = [];
  const put = (kind, text) => {
    if (text && parts.at(-1)?.kind === kind) parts.at(-1).text += text;
    else if (text) parts.push({kind, text});
  };
  let [removed, added] = ['', ''];
  const keep = (text) => {
    put('removed', removed);
    put('added', added);
    removed = added = '';
    put('same', text);
  };
  keep(a.slice(0, begin).join(''));
  const length = commonLengths(a.slice(begin, n), b.slice(begin, m));
  let [i, j] = [begin, begin];
  while (i < n || j < m) {
    if (i < n && j < m && a[i] === b[j]) {
      const joins = !a[i].trim() && removed && added && a[i + 1] !== b[j + 1]; // a space between words that differ
      if (joins) [removed, added] = [removed + a[i], added + a[i]];
      else keep(a[i]);
      i++;
      j++;
    } else if (j === m || (i < n && length(i - begin + 1, j - begin) >= length(i - begin, j - begin + 1))) {
      removed += a[i++];
    } else {
      added += b[j++];
    }
  }
  keep(a.slice(n).join(''));
  return parts;
}

/** The length of the longest common subsequence of the rests of a and b from i and j on. */
function commonLengths(a, b) {
  if (a.length * b.length > MAX_PAIRS) return () => 0;
  const width = b.length + 1;
  const lengths = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1, at = i * width + j; j >= 0; j--, at--) {
      lengths[at] = a[i] === b[j] ? lengths[at + width + 1] + 1 : Math.max(lengths[at + width], lengths[at + 1]);
    }
  }
  return (i, j) => lengths[i * width + j];
}
