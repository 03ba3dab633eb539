/* attention.c: the kernels as a C library, without the server.
 *
 *   make install && cc attention.c $(pkg-config --cflags --libs attn) -o attention && ./attention
 *
 * The program computes causal attention of two queries over two keys. The first query sees only the first key, so its
 * row of out is the first row of v. The program then does the same with numbers of heads that do not fit together, to
 * show an error message. */
#include <attn/attention.h>
#include <stdio.h>

/* Computes the problem p on the CPU, in the memory where its tensors are. A GPU (device "cuda") has memory of its
 * own: allocate it with attn_device_alloc(), and copy the tensors there with attn_copy(). */
static attn_status compute(const attn_problem *p, attn_error *err)
{
    attn_device *device = NULL;
    attn_stream *stream = NULL;
    attn_status status = attn_check(p, err);
    if (status == ATTN_OK) status = attn_device_open("cpu", 0, NULL, &device, err);
    if (status == ATTN_OK) status = attn_stream_open(device, &stream, err);
    if (status == ATTN_OK) status = attn_forward(stream, p, NULL, err);
    if (status == ATTN_OK) status = attn_stream_wait(stream, err);
    attn_stream_close(stream);
    attn_device_close(device);
    return status;
}

int main(void)
{
    enum { B = 1, S = 2, H = 1, D = 2 };
    float identity[S * D] = { 1, 0, 0, 1 }, values[S * D] = { 1, 2, 3, 4 }, result[S * D], lse[S];
    const int64_t shape[] = { B, S, H, D }, lse_shape[] = { B, H, S }, two_heads[] = { B, S / 2, H * 2, D };
    attn_verification check;
    attn_error err;

    attn_problem p = ATTN_PROBLEM_INIT; /* a forward with the default scale 1/sqrt(D) and without a mask */
    p.q = p.k = attn_tensor_make(identity, ATTN_F32, 4, shape);
    p.v = attn_tensor_make(values, ATTN_F32, 4, shape);
    p.out = attn_tensor_make(result, ATTN_F32, 4, shape);
    p.lse = attn_tensor_make(lse, ATTN_F32, 3, lse_shape);
    p.causal = true;
    if (compute(&p, &err) != ATTN_OK || attn_verify(&p, -1, &check, &err) != ATTN_OK) {
        fprintf(stderr, "%s: %s\n", attn_status_name(err.status), err.text);
        return 1;
    }
    printf("out: %g %g, %g %g; %lld rows checked in float64, the largest error is %.1e\n", result[0], result[1],
           result[2], result[3], (long long)check.rows, check.max_abs);
    if (result[0] != values[0] || result[1] != values[1] || check.max_abs > 1e-5) return 1;

    p.k = attn_tensor_make(identity, ATTN_F32, 4, two_heads);
    if (compute(&p, &err) == ATTN_OK) return 1;
    printf("refused: %s\n", err.text);
    return 0;
}
