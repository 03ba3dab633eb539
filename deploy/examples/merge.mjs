// merge.mjs: merges the results over two parts of the keys, in Node (18 or later).
//
//   node merge.mjs [http://127.0.0.1:8080]
const url = process.argv[2] ?? 'http://127.0.0.1:8080';

const tensor = (shape, numbers) => ({
  shape, dtype: 'float32', data: Buffer.from(Float32Array.from(numbers).buffer).toString('base64'),
});
const numbers = ({data}) => {
  const bytes = Buffer.from(data, 'base64');
  return [...new Float32Array(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length))];
};

async function attention(op, members) {
  const answer = await fetch(`${url}/v1/attention/${op}`, {
    method: 'POST', headers: {'Content-Type': 'application/json'}, body: JSON.stringify(members),
  });
  const body = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(body.detail), {code: body.code, pointer: body.pointer});
  return body;
}

// One query attends to four keys, which are stored in two places. Each place answers for its part of the keys, and the
// merge takes out and lse of these two answers.
const q = tensor([1, 1, 1, 2], [1, 2]); // axes: batch, position, head, channel [B, S, H, D]
const keys = [1, 0, 0, 1, 1, 1, -1, 0], values = [1, 2, 3, 4, 5, 6, 7, 8];
const of = (a, b) => ({q, k: tensor([1, b - a, 1, 2], keys.slice(2 * a, 2 * b)), v: tensor([1, b - a, 1, 2], values.slice(2 * a, 2 * b))});
const whole = await attention('forward', of(0, 4));
const parts = await Promise.all([attention('forward', of(0, 1)), attention('forward', of(1, 4))]);
const merged = await attention('merge', {parts: parts.map(({out, lse}) => ({out, lse}))});
const want = numbers(whole.out), got = numbers(merged.out);
const error = Math.max(...got.map((x, i) => Math.abs(x - want[i])));
console.log(`${merged.sizes.parts} parts: out ${got.map(x => x.toFixed(4)).join(' ')}, the largest error is ${error.toExponential(1)}`);
if (!(error < 1e-5)) throw new Error(`wanted ${want}`);

try {
  await attention('merge', {parts: [{out: parts[0].out, lse: tensor([1, 1, 1], [NaN])}]});
  process.exitCode = 1;
} catch (e) {
  console.log(`refused: ${e.message} (${e.code} at ${e.pointer})`);
}
