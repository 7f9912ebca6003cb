/* Two kernels from C, without Python: what is known of each position, and which positions one step may
 * commit. */
#include <dlmkern.h>
#include <stdio.h>

enum { B = 1, N = 4, V = 6 };

static dlmkern_view view1(void* data, dlmkern_dtype dtype) {
  const dlmkern_view view = {data, dtype, 1, {B}, {1}};
  return view;
}

static dlmkern_view view2(void* data, dlmkern_dtype dtype) {
  const dlmkern_view view = {data, dtype, 2, {B, N}, {N, 1}};
  return view;
}

static int check(const char* function, int code) {
  if (code != DLMKERN_OK) fprintf(stderr, "%s: %s\n", function, dlmkern_error_string(code));
  return code != DLMKERN_OK;
}

int main(void) {
  /* Positions 0 and 1 are sure of different tokens, 2 is sure of the same token as 0, 3 is not sure of
   * anything. */
  float logits[B][N][V] = {{{9, 0, 0, 0, 0, 0}, {0, 5, 0, 0, 0, 0}, {4, 0, 0, 0, 0, 0}, {0, 0, 0, 1, 0, 0}}};
  int64_t token[B][N];
  double confidence[B][N], logsumexp[B][N], entropy[B][N];
  uint8_t selected[B][N];
  double tau_low[B] = {0.8}, tau_high[B] = {1.1}, gamma[B] = {-6.0};

  const dlmkern_view logits_view = {logits, DLMKERN_FLOAT32, 3, {B, N, V}, {N * V, V, 1}};
  const dlmkern_view token_view = view2(token, DLMKERN_INT64);
  const dlmkern_view confidence_view = view2(confidence, DLMKERN_FLOAT64);
  const dlmkern_view logsumexp_view = view2(logsumexp, DLMKERN_FLOAT64);
  const dlmkern_view entropy_view = view2(entropy, DLMKERN_FLOAT64);
  const dlmkern_view selected_view = view2(selected, DLMKERN_BOOL);
  const dlmkern_view low_view = view1(tau_low, DLMKERN_FLOAT64);
  const dlmkern_view high_view = view1(tau_high, DLMKERN_FLOAT64);
  const dlmkern_view gamma_view = view1(gamma, DLMKERN_FLOAT64);

  printf("dlmkern %s, %s\n", dlmkern_version(), dlmkern_cpu_isa());
  if (check("token_stats", dlmkern_cpu_token_stats(&logits_view, NULL, NULL, -1, &token_view,
                                                   &confidence_view, &logsumexp_view, &entropy_view, NULL))) {
    return 1;
  }
  if (check("cap_select", dlmkern_cpu_cap_select(&logits_view, &token_view, &logsumexp_view, NULL, &low_view,
                                                 &high_view, &gamma_view, 0, &selected_view, NULL))) {
    return 1;
  }
  for (int i = 0; i < N; ++i) {
    printf("position %d: token %lld, confidence %.6f, entropy %.6f, %s\n", i, (long long)token[0][i],
           confidence[0][i], entropy[0][i], selected[0][i] ? "commit" : "wait");
  }
  return 0;
}
