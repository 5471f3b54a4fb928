// A prefill engine in C, in a process of its own: prints its address, computes the first layer of
// what it is asked for, says so, and stands still until it is killed.
#include <baton/baton.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define LAYERS 3
#define BLOCKS 32
#define BLOCK_TOKENS 8
#define ROW 16  // bytes of K, and of V, of a token

static unsigned char cache[LAYERS][2][BLOCKS][BLOCK_TOKENS][ROW];

static void check(int32_t result, const baton_error* error) {
  if (result >= 0) return;
  fprintf(stderr, "%s: %s\n", baton_result_name(result), error->text);
  exit(1);
}

int main(void) {
  baton_error error = BATON_ERROR_INIT;
  baton_kv_connector_options options;
  baton_kv_connector_options_init(&options, sizeof options);
  options.name = "prefill-in-C";
  options.allow_pull = 1;
  baton_kv_connector* connector;
  check(baton_kv_connector_create(&options, &connector, &error), &error);

  baton_kv_model model = {sizeof model, "weights", 0, 0, 0};
  baton_kv_group group = {sizeof group, 0, LAYERS, BLOCKS, BLOCK_TOKENS, 0, 2, 0, 2};
  baton_kv_paged paged = {sizeof paged, ROW / 2, BATON_KV_BYTE, BATON_KV_NHD, BATON_KV_SPLIT, 0};
  baton_descriptor tensors[2 * LAYERS];
  for (int i = 0; i < 2 * LAYERS; ++i) {
    tensors[i].address = (uint64_t)(uintptr_t)cache[i / 2][i % 2];
    tensors[i].bytes = sizeof cache[0][0];
    tensors[i].device = 0;
  }
  baton_kv_layout* layout;
  check(baton_kv_layout_create(&model, &layout, &error), &error);
  check(baton_kv_layout_add_paged(layout, BATON_DRAM, tensors, 2 * LAYERS, &group, &paged, &error),
        &error);
  check(baton_kv_connector_register_cache(connector, layout, &error), &error);
  baton_kv_layout_destroy(layout);
  baton_bytes address;
  check(baton_kv_connector_address(connector, &address, &error), &error);
  puts(address.data);
  fflush(stdout);
  baton_bytes_free(&address);

  baton_kv_job job;
  job.size = sizeof job;
  int32_t got = BATON_ERR_NOT_FOUND;
  while ((got = baton_kv_job_next(connector, &job, &error)) == BATON_ERR_NOT_FOUND) {
    baton_kv_connector_wait(connector, 1000000000, &error);
  }
  check(got, &error);
  uint32_t blocks[BLOCKS];
  const size_t count = (job.token_count + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
  for (size_t i = 0; i < count; ++i) blocks[i] = (uint32_t)(BLOCKS - 1 - i);
  check(baton_kv_job_save_layer(connector, job.job, 0, 0, blocks, count, &error), &error);
  puts("stands");
  fflush(stdout);
  for (;;) pause();
}
