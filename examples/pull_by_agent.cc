// Decode pulls four pages out of prefill's memory, by lists of descriptors. Both live in this
// process; in yours, the metadata travels by whatever means the two have.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kvtransfer/agent.h"

using baton::kvtransfer::Agent;
using baton::kvtransfer::StridedDescriptor;

void check(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::exit(1);
}
template <typename T>
T check(absl::StatusOr<T> result) {
  check(result.status());
  return *std::move(result);
}

constexpr size_t kPage = 4096, kPages = 64;

std::vector<StridedDescriptor> pages(const std::vector<char>& memory) {
  return {{reinterpret_cast<uint64_t>(memory.data()), kPage, 0, kPage, kPages}};
}

int main() {
  std::vector<char> there(kPage * kPages), here(kPage * kPages);
  for (size_t i = 0; i < there.size(); ++i) there[i] = static_cast<char>(i / kPage);
  const auto prefill = check(Agent::create({.name = "prefill"}));
  const auto decode = check(Agent::create({.name = "decode"}));
  check(prefill->register_memory({{pages(there)[0].address, there.size(), 0}}));
  check(decode->register_memory({{pages(here)[0].address, here.size(), 0}}));
  check(decode->add_remote(check(prefill->metadata())).status());

  // All pages, prepared once; a request names some of them by number.
  const auto local = check(decode->prepare_local(pages(here)));
  const auto remote = check(decode->prepare_remote("prefill", pages(there)));
  const auto pull = check(decode->make_transfer(baton::Op::kRead, local, {0, 1, 2, 3}, remote,
                                                {9, 7, 33, 34}, "request 1"));
  check(decode->post(pull));
  check(decode->wait(pull));
  check(decode->release(pull));

  auto messages = prefill->messages();
  while (messages.empty()) messages = prefill->messages();
  std::printf("decode has pages %d %d %d %d; %s heard of \"%s\"\n", here[0], here[kPage],
              here[2 * kPage], here[3 * kPage], prefill->name().c_str(),
              messages[0].payload.c_str());
  return 0;
}
