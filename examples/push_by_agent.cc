// Prefill pushes four pages into decode's memory as soon as it has computed them. Decode is found
// by its name, in a folder that both see; etcd://HOST:PORT does the same between machines.
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "kvtransfer/agent.h"
using namespace baton::kvtransfer;

constexpr size_t kPage = 4096, kPages = 64;

void check(const absl::Status& status) {
  if (!status.ok()) throw absl::BadStatusOrAccess(status);
}

int main() {
  std::vector<char> here(kPage * kPages), there(kPage * kPages);
  for (size_t i = 0; i < here.size(); ++i) here[i] = static_cast<char>(i / kPage);
  std::string store = "file:///tmp/baton-push-XXXXXX";
  if (mkdtemp(store.data() + 7) == nullptr) return 1;  // behind file://
  const auto prefill = Agent::create({.name = "prefill", .metadata_store = store}).value();
  const auto decode = Agent::create({.name = "decode", .metadata_store = store}).value();
  const StridedDescriptor ours{reinterpret_cast<uint64_t>(here.data()), kPage, 0, kPage, kPages};
  const StridedDescriptor theirs{reinterpret_cast<uint64_t>(there.data()), kPage, 0, kPage, kPages};
  const auto local = prefill->register_rows({ours}).value();
  check(decode->register_rows({theirs}).status());
  check(decode->publish_metadata());
  check(prefill->follow_metadata("decode"));
  while (!prefill->has_remote("decode")) prefill->progress();

  const auto remote = prefill->prepare_remote("decode", {theirs}).value();
  const auto write = prefill->make_transfer(baton::Op::kWrite, local, {9, 7, 33, 34}, remote,
                                            {0, 1, 2, 3}, "request 1");
  check(prefill->run(write.value()));
  // Decode needs nothing but the message: it comes behind the last byte.
  const auto messages = decode->wait_messages();
  std::printf("decode has pages %d %d %d %d; \"%s\"\n", there[0], there[kPage], there[2 * kPage],
              there[3 * kPage], messages[0].payload.c_str());
  std::filesystem::remove_all(store.substr(7));
}
