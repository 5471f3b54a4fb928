// Prefill pushes four pages into decode's memory, in C, as soon as it has computed them. Both live
// in this process; in yours, the metadata travels by whatever means the two have.
#include <baton/baton.h>
#include <stdio.h>

enum { kPage = 4096, kPages = 64 };
static char here[kPages][kPage], there[kPages][kPage];

int main(void) {
  for (int i = 0; i < kPages * kPage; ++i) here[i / kPage][i % kPage] = (char)(i / kPage);
  const baton_strided ours = {(uint64_t)here, kPage, 0, kPage, kPages};
  const baton_strided theirs = {(uint64_t)there, kPage, 0, kPage, kPages};
  const int64_t from[] = {9, 7, 33, 34}, to[] = {0, 1, 2, 3};
  baton_error error = BATON_ERROR_INIT;
  baton_agent *prefill, *decode;
  baton_bytes metadata, message;
  baton_list local, remote;
  baton_transfer push;
  if (baton_agent_open("prefill", &prefill, &error) ||
      baton_agent_open("decode", &decode, &error) ||
      baton_list_register(prefill, BATON_DRAM, &ours, 1, &local, &error) ||
      baton_list_register(decode, BATON_DRAM, &theirs, 1, NULL, &error) ||
      baton_agent_metadata(decode, &metadata, &error) ||
      baton_agent_add_remote(prefill, metadata.data, metadata.size, NULL, &error) ||
      baton_list_prepare_strided(prefill, "decode", BATON_DRAM, &theirs, 1, &remote, &error) ||
      baton_transfer_make(prefill, BATON_WRITE, local, from, 4, remote, to, 4, "request 1", 9,
                          &push, &error) ||
      baton_transfer_run(prefill, push, BATON_FOREVER, &error) ||
      // Decode needs nothing but the message: it comes behind the last byte.
      baton_wait_message(decode, BATON_FOREVER, NULL, &message, &error)) {
    fprintf(stderr, "%s\n", error.text);
    return 1;
  }
  printf("decode has pages %d %d %d %d; prefill said \"%s\"\n", there[0][0], there[1][9],
         there[2][99], there[3][999], message.data);
  baton_bytes_free(&message);
  baton_bytes_free(&metadata);
  baton_agent_destroy(decode);
  baton_agent_destroy(prefill);
}
