// Prefill pushes four pages into decode's memory as soon as it has computed them. Decode is found
// by its name, in a folder that both see; etcd://HOST:PORT does the same between machines.
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <stdexcept>

#include "kvtransfer/agent.h"
using namespace baton::kvtransfer;

constexpr size_t kPage = 4096, kPages = 64;

void check(const absl::Status& status) {
  if (!status.ok()) throw std::runtime_error(status.ToString());
}

int main() {
  std::vector<char> here(kPage * kPages), there(kPage * kPages);
  for (size_t i = 0; i < here.size(); ++i) here[i] = static_cast<char>(i / kPage);
  const std::string folder = "/tmp/baton-push-" + std::to_string(getpid());
  std::filesystem::create_directory(folder);
  const std::string store = "file://" + folder;
  const auto prefill = Agent::create({.name = "prefill", .metadata_store = store}).value();
  const auto decode = Agent::create({.name = "decode", .metadata_store = store}).value();
  const StridedDescriptor ours{reinterpret_cast<uint64_t>(here.data()), kPage, 0, kPage, kPages};
  const StridedDescriptor theirs{reinterpret_cast<uint64_t>(there.data()), kPage, 0, kPage, kPages};
  check(prefill->register_memory({{ours.address, here.size(), 0}}));
  check(decode->register_memory({{theirs.address, there.size(), 0}}));
  check(decode->publish_metadata());
  check(prefill->follow_metadata("decode"));
  while (!prefill->has_remote("decode")) usleep(1000);

  const auto local = prefill->prepare_local({ours}).value();
  const auto remote = prefill->prepare_remote("decode", {theirs}).value();
  const auto write = prefill->make_transfer(baton::Op::kWrite, local, {9, 7, 33, 34}, remote,
                                            {0, 1, 2, 3}, "request 1");
  check(prefill->post(write.value()));
  // Decode needs nothing but the message: it comes behind the last byte.
  auto messages = decode->messages();
  while (messages.empty()) messages = decode->messages();
  std::printf("decode has pages %d %d %d %d; \"%s\"\n", there[0], there[kPage], there[2 * kPage],
              there[3 * kPage], messages[0].payload.c_str());
  check(prefill->release(*write));
  std::filesystem::remove_all(folder);
}
