// A prefill engine in C, in a process of its own: prints its address, then computes what is asked
// for until it is killed. The KV of a token is what it and the layer say. With a number, it stands
// still before the layer of that number.
#include <baton/baton.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
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

int main(int argc, char** argv) {
  const int stop_before = argc > 1 ? atoi(argv[1]) : -1;
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

  for (;;) {
    baton_kv_job job;
    job.size = sizeof job;
    const int32_t got = baton_kv_job_next(connector, &job, &error);
    if (got == BATON_ERR_NOT_FOUND) {
      baton_kv_connector_wait(connector, 1000000000, &error);
      continue;
    }
    check(got, &error);
    uint32_t blocks[BLOCKS];
    const size_t count = (job.token_count + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    for (size_t i = 0; i < count; ++i) blocks[i] = (uint32_t)(BLOCKS - 1 - i);
    for (int layer = 0; layer < LAYERS; ++layer) {
      if (layer == stop_before) {
        puts("stands");
        fflush(stdout);
        pause();
      }
      for (size_t t = 0; t < job.token_count; ++t) {
        for (int which = 0; which < 2; ++which) {
          memset(cache[layer][which][blocks[t / BLOCK_TOKENS]][t % BLOCK_TOKENS],
                 job.tokens[t] + layer + which, ROW);
        }
      }
      // What decode has given up meanwhile is finished all the same.
      baton_kv_job_save_layer(connector, job.job, (uint32_t)layer, 0, blocks, count, &error);
    }
    check(baton_kv_job_give_payload(connector, job.job, "token 5", 7, &error), &error);
    check(baton_kv_job_finish(connector, job.job, BATON_OK, 0, &error), &error);
    while (baton_kv_job_state(connector, job.job, &error) == BATON_IN_PROGRESS) {
      baton_kv_connector_wait(connector, 10000000, &error);
    }
  }
}
