// Prefill pushes four pages into decode's memory, in C, as soon as it has computed them. Both live
// in this process; in yours, the metadata travels by whatever means the two have.
#include <baton/baton.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kPage = 4096, kPages = 64 };
static char here[kPages][kPage], there[kPages][kPage];
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
  for (int page = 0; page < kPages; ++page) memset(here[page], page, kPage);
  baton_agent *prefill = make("prefill", here), *decode = make("decode", there);
  baton_bytes metadata, sender, message;
  check(baton_agent_metadata(decode, &metadata, &error));
  check(baton_agent_add_remote(prefill, metadata.data, metadata.size, NULL, &error));
  baton_bytes_free(&metadata);

  const baton_strided ours = {(uint64_t)here, kPage, 0, kPage, kPages};
  const baton_strided theirs = {(uint64_t)there, kPage, 0, kPage, kPages};
  const int64_t from[] = {9, 7, 33, 34}, to[] = {0, 1, 2, 3};
  baton_list local, remote;
  baton_transfer push;
  check(baton_list_prepare_strided(prefill, NULL, BATON_DRAM, &ours, 1, &local, &error));
  check(baton_list_prepare_strided(prefill, "decode", BATON_DRAM, &theirs, 1, &remote, &error));
  check(baton_transfer_make(prefill, BATON_WRITE, local, from, 4, remote, to, 4, "request 1", 9,
                            &push, &error));
  check(baton_transfer_post(prefill, push, NULL, 0, &error));

  // Decode needs nothing but the message: it comes behind the last byte.
  while (baton_next_message(decode, &sender, &message, &error) != BATON_OK) continue;
  printf("decode has pages %d %d %d %d; %s said \"%s\"\n", there[0][0], there[1][9], there[2][99],
         there[3][999], sender.data, message.data);
  baton_bytes_free(&sender);
  baton_bytes_free(&message);
  check(baton_transfer_release(prefill, push, BATON_FOREVER, &error));
  baton_agent_destroy(prefill);
  baton_agent_destroy(decode);
}
