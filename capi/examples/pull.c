// Decode pulls four pages out of prefill's memory, in C. Both live in this process; in yours, the
// metadata travels by whatever means the two have.
#include <baton/baton.h>
#include <stdio.h>

enum { kPage = 4096, kPages = 64 };
static char there[kPages][kPage], here[kPages][kPage];

int main(void) {
  for (int i = 0; i < kPages * kPage; ++i) there[i / kPage][i % kPage] = (char)(i / kPage);
  // All pages of each side in one row; a request names some of them by number.
  const baton_strided theirs = {(uint64_t)there, kPage, 0, kPage, kPages};
  const baton_strided ours = {(uint64_t)here, kPage, 0, kPage, kPages};
  const int64_t to[] = {0, 1, 2, 3}, from[] = {9, 7, 33, 34};
  baton_error error = BATON_ERROR_INIT;
  baton_agent *prefill, *decode;
  baton_bytes metadata, message;
  baton_list local, remote;
  baton_transfer pull;
  if (baton_agent_open("prefill", &prefill, &error) ||
      baton_agent_open("decode", &decode, &error) ||
      baton_list_register(prefill, BATON_DRAM, &theirs, 1, NULL, &error) ||
      baton_list_register(decode, BATON_DRAM, &ours, 1, &local, &error) ||
      baton_agent_metadata(prefill, &metadata, &error) ||
      baton_agent_add_remote(decode, metadata.data, metadata.size, NULL, &error) ||
      baton_list_prepare_strided(decode, "prefill", BATON_DRAM, &theirs, 1, &remote, &error) ||
      baton_transfer_make(decode, BATON_READ, local, to, 4, remote, from, 4, "request 1", 9, &pull,
                          &error) ||
      baton_transfer_run(decode, pull, BATON_FOREVER, &error) ||
      baton_wait_message(prefill, BATON_FOREVER, NULL, &message, &error)) {
    fprintf(stderr, "%s\n", error.text);
    return 1;
  }
  printf("decode has pages %d %d %d %d; prefill heard of \"%s\"\n", here[0][0], here[1][9],
         here[2][99], here[3][999], message.data);
  baton_bytes_free(&message);
  baton_bytes_free(&metadata);
  baton_agent_destroy(decode);
  baton_agent_destroy(prefill);
}
