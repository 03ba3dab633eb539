// node_client.mjs: attention from Node (18 or later; only fetch is needed), or from any other JavaScript.
//
//   node node_client.mjs [http://127.0.0.1:8080]
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

// Two queries over two keys, causal: the first query sees only the first key, so its row of out is the first row of v.
const shape = [1, 2, 1, 2]; // axes: batch, position, head, channel [B, S, H, D]
const q = tensor(shape, [1, 0, 0, 1]), v = tensor(shape, [1, 2, 3, 4]);
const {out, backend} = await attention('forward', {q, k: q, v, causal: true});
const weight = 1 / (1 + Math.exp(-1 / Math.sqrt(2))); // weight that the second query gives to the second key
const want = [1, 2, 1 + 2 * weight, 2 + 2 * weight];
const error = Math.max(...numbers(out).map((x, i) => Math.abs(x - want[i])));
console.log(`${backend}: out ${numbers(out).map(x => x.toFixed(4)).join(' ')}, the largest error is ${error.toExponential(1)}`);
if (!(error < 1e-5)) throw new Error(`wanted ${want}`);

// an observe needs no v
const looks = await attention('observe', {q, k: q, causal: true, observe: ['entropy', 'pairs']});
// entropy of the second query's weights
const entropy = -weight * Math.log(weight) - (1 - weight) * Math.log(1 - weight);
if (!(Math.abs(numbers(looks.entropy)[1] - entropy) < 1e-5)) throw new Error(`wanted ${entropy}`);
console.log(`observe: ${looks.pairs} pairs, entropy ${numbers(looks.entropy).map(x => x.toFixed(4)).join(' ')}`);

try {
  await attention('forward', {q, k: q, v: tensor([1, 3, 1, 2], [1, 2, 3, 4, 5, 6])});
  process.exitCode = 1;
} catch (e) {
  console.log(`refused: ${e.message} (${e.code} at ${e.pointer})`);
}
