// Prefill pushes four pages into decode's memory as soon as it has computed them. Decode is found
// by its name, in a folder that both see; etcd://HOST:PORT does the same between machines.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
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
  char folder[] = "/tmp/baton-push-XXXXXX";
  if (mkdtemp(folder) == nullptr) return 1;
  const std::string store = std::string("file://") + folder;
  std::vector<char> here(kPage * kPages), there(kPage * kPages);
  for (size_t i = 0; i < here.size(); ++i) here[i] = static_cast<char>(i / kPage);
  {
    const auto prefill = check(Agent::create({.name = "prefill", .metadata_store = store}));
    const auto decode = check(Agent::create({.name = "decode", .metadata_store = store}));
    check(prefill->register_memory({{pages(here)[0].address, here.size(), 0}}));
    check(decode->register_memory({{pages(there)[0].address, there.size(), 0}}));
    check(decode->publish_metadata());
    check(prefill->follow_metadata("decode"));
    while (!prefill->has_remote("decode")) usleep(1000);

    const auto local = check(prefill->prepare_local(pages(here)));
    const auto remote = check(prefill->prepare_remote("decode", pages(there)));
    const auto push = check(prefill->make_transfer(baton::Op::kWrite, local, {9, 7, 33, 34}, remote,
                                                   {0, 1, 2, 3}, "request 1"));
    check(prefill->post(push));

    // Decode needs nothing but the message: it comes behind the last byte.
    auto messages = decode->messages();
    while (messages.empty()) messages = decode->messages();
    std::printf("decode has pages %d %d %d %d; %s said \"%s\"\n", there[0], there[kPage],
                there[2 * kPage], there[3 * kPage], messages[0].agent.c_str(),
                messages[0].payload.c_str());
    check(prefill->release(push));
  }
  std::filesystem::remove_all(folder);
  return 0;
}
