// Decode pulls four pages out of prefill's memory, by lists of descriptors. Both live in this
// process; in yours, the metadata travels by whatever means the two have.
#include <cstdio>
#include <stdexcept>
#include <vector>

#include "kvtransfer/agent.h"
using namespace baton::kvtransfer;

constexpr size_t kPage = 4096, kPages = 64;

void check(const absl::Status& status) {
  if (!status.ok()) throw std::runtime_error(status.ToString());
}

int main() {
  std::vector<char> there(kPage * kPages), here(kPage * kPages);
  for (size_t i = 0; i < there.size(); ++i) there[i] = static_cast<char>(i / kPage);
  const auto prefill = Agent::create({.name = "prefill"}).value();
  const auto decode = Agent::create({.name = "decode"}).value();
  // All pages of each side in one row; a request names some of them by number.
  const StridedDescriptor theirs{reinterpret_cast<uint64_t>(there.data()), kPage, 0, kPage, kPages};
  const StridedDescriptor ours{reinterpret_cast<uint64_t>(here.data()), kPage, 0, kPage, kPages};
  check(prefill->register_rows({theirs}).status());
  const auto local = decode->register_rows({ours}).value();
  check(decode->add_remote(prefill->metadata().value()).status());
  const auto remote = decode->prepare_remote("prefill", {theirs}).value();

  const auto pull = decode->make_transfer(baton::Op::kRead, local, {0, 1, 2, 3}, remote,
                                          {9, 7, 33, 34}, "request 1");
  check(decode->run(pull.value()));

  const auto messages = prefill->wait_messages();
  std::printf("decode has pages %d %d %d %d; prefill heard of \"%s\"\n", here[0], here[kPage],
              here[2 * kPage], here[3 * kPage], messages[0].payload.c_str());
}
