// Decode pulls four pages out of prefill's memory, in C. Both live in this process; in yours, the
// metadata travels by whatever means the two have.
#include <baton/baton.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kPage = 4096, kPages = 64 };
static char there[kPages][kPage], here[kPages][kPage];
static baton_error error = BATON_ERROR_INIT;

static void check(int32_t result) {
  if (result != BATON_OK) fprintf(stderr, "%s\n", error.text), exit(1);
}

static baton_agent* make(const char* name, void* memory) {
  baton_agent_options options;
  baton_agent_options_init(&options, sizeof options);
  options.name = name;
  baton_agent* agent;
  check(baton_agent_create(&options, &agent, &error));
  const baton_descriptor whole = {(uint64_t)memory, sizeof here, 0};
  check(baton_agent_register(agent, BATON_DRAM, &whole, 1, &error));
  return agent;
}

int main(void) {
  for (int page = 0; page < kPages; ++page) memset(there[page], page, kPage);
  baton_agent *prefill = make("prefill", there), *decode = make("decode", here);
  baton_bytes metadata, sender, message;
  check(baton_agent_metadata(prefill, &metadata, &error));
  check(baton_agent_add_remote(decode, metadata.data, metadata.size, NULL, &error));
  baton_bytes_free(&metadata);

  // All pages, prepared once; a request names some of them by number.
  const baton_strided ours = {(uint64_t)here, kPage, 0, kPage, kPages};
  const baton_strided theirs = {(uint64_t)there, kPage, 0, kPage, kPages};
  const int64_t to[] = {0, 1, 2, 3}, from[] = {9, 7, 33, 34};
  baton_list local, remote;
  baton_transfer pull;
  check(baton_list_prepare_strided(decode, NULL, BATON_DRAM, &ours, 1, &local, &error));
  check(baton_list_prepare_strided(decode, "prefill", BATON_DRAM, &theirs, 1, &remote, &error));
  check(baton_transfer_make(decode, BATON_READ, local, to, 4, remote, from, 4, "request 1", 9,
                            &pull, &error));
  check(baton_transfer_post(decode, pull, NULL, 0, &error));
  check(baton_transfer_wait(decode, pull, 10000000000, &error));
  check(baton_transfer_release(decode, pull, BATON_FOREVER, &error));

  while (baton_next_message(prefill, &sender, &message, &error) != BATON_OK) continue;
  printf("%s has pages %d %d %d %d; prefill heard of \"%s\"\n", sender.data, here[0][0], here[1][9],
         here[2][99], here[3][999], message.data);
  baton_bytes_free(&sender);
  baton_bytes_free(&message);
  baton_agent_destroy(decode);
  baton_agent_destroy(prefill);
}
