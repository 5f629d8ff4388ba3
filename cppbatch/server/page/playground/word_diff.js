// The differences between two texts, word by word. No DOM.

const MAX_PAIRS = 2e6; // bounds time and memory: 1,400 words and spaces on each side

/**
 * The parts of two texts, [{kind: 'same' | 'removed' | 'added', text}], by the longest common subsequence of their
 * words. In longer texts all between the first and the last difference is removed and added.
 */
export function wordDiff(from, to) {
  const [a, b] = [from, to].map((text) => text.match(/[\p{L}\p{N}_'’]+|\s+|[^\p{L}\p{N}_'’\s]/gu) ?? []);
  let begin = 0;
  while (begin < a.length && a[begin] === b[begin]) begin++;
  let end = 0;
  while (end < Math.min(a.length, b.length) - begin && a.at(-1 - end) === b.at(-1 - end)) end++;
  const [n, m] = [a.length - end, b.length - end];
  const common = commonLengths(a.slice(begin, n), b.slice(begin, m));
  const parts = [];
  let part = {same: a.slice(0, begin).join(''), removed: '', added: ''}; // what is same comes first
  const flush = () => {
    for (const [kind, text] of Object.entries(part)) if (text) parts.push({kind, text});
    part = {same: '', removed: '', added: ''};
  };
  for (let i = begin, j = begin; i < n || j < m;) {
    if (i < n && j < m && a[i] === b[j]) {
      if (part.removed && part.added && !a[i].trim() && a[i + 1] !== b[j + 1]) { // a space between words that differ
        part.removed += a[i];
        part.added += a[i];
      } else {
        if (part.removed || part.added) flush();
        part.same += a[i];
      }
      i++;
      j++;
    } else if (j === m || (i < n && common(i - begin + 1, j - begin) >= common(i - begin, j - begin + 1))) {
      part.removed += a[i++];
    } else {
      part.added += b[j++];
    }
  }
  if (part.removed || part.added) flush();
  part.same += a.slice(n).join('');
  flush();
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
