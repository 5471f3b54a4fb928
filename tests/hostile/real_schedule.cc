// The shared memory of a schedule of real faults, and the plan that a seed makes.
#include "tests/hostile/real_schedule.h"

#include <new>

#include "tests/std.h"

namespace baton {
namespace {

char* map(size_t bytes, int fd) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | (fd < 0 ? MAP_ANONYMOUS : 0),
                  fd, 0);
  if (at == MAP_FAILED) std::abort();
  return static_cast<char*>(at);
}

}  // namespace

RealSchedule::RealSchedule(std::string over, uint64_t number, RealNetwork where)
    : provider(std::move(over)), seed(number), network(where) {
  std::mt19937_64 random(seed);
  const auto pick = [&](size_t limit) { return static_cast<size_t>(random() % limit); };
  shared = new (map(sizeof(RealShared), -1)) RealShared;
  for (size_t side = 0; side < 2; ++side) {
    files[side] = memfd_create("baton-test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (ftruncate(files[side], 2 * kRealHalf) != 0) std::abort();
    fcntl(files[side], F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);
    memory[side] = map(2 * kRealHalf, files[side]);
  }
  with_file = pick(2) == 0;
  const std::string slice = std::to_string(4 << pick(4));
  if (provider == "tcp") {
    settings = {{"tcp.sockets", std::to_string(1 + pick(3))},
                {"tcp.slice_kib", slice},
                {"tcp.buffer_kib", "64"}};
    if (pick(4) == 0) settings.emplace_back("tcp.integrity", "on");
  } else if (provider == "ucx") {
    settings = {{"ucx.slice_kib", slice}};
  } else if (provider == "shm" && pick(4) == 0 && with_file) {
    settings = {{"shm.cma", "off"}};
  }
  // A busy machine is no reason to give up; a network that is gone for good is one, soon.
  settings.emplace_back("peer.answer_ms", network.survives ? "600000" : "2000");
  settings.emplace_back("peer.redial_ms", network.survives ? "60000" : "500");
  if (network.own) {
    if (seed % 5 == 0) settings.emplace_back(provider + ".encrypt", "on");
    settings.emplace_back(provider + ".stall_ms", "500");
    settings.emplace_back(provider + ".handshake_ms", "1500");
  }
  for (size_t i = 0; i < kRealTransfers; ++i) {
    RealPlan& item = plan[i];
    item.from = pick(2);
    item.op = pick(4) == 0 ? Op::kRead : Op::kWrite;
    const size_t sizes[] = {0, 1 + pick(100), 1 + pick(8192), 1 + pick(kRealBlock), kRealBlock};
    item.bytes = item.op == Op::kRead ? 1 + pick(kRealBlock) : sizes[pick(5)];
    if (pick(6) == 0) item.timeout_ms = static_cast<int>(pick(network.own ? 300 : 30));
    // When the network goes for good, each side has something to miss.
    if (!network.survives && i + 2 >= kRealTransfers) {
      item = {.from = i % 2, .op = Op::kWrite, .bytes = kRealBlock};
    }
    char* source = block(1 - item.target(), i, false);
    for (size_t at = 0; at < item.bytes; ++at) source[at] = real_byte(seed, i, at);
  }
}

RealSchedule::~RealSchedule() {
  for (size_t side = 0; side < 2; ++side) {
    munmap(memory[side], 2 * kRealHalf);
    close(files[side]);
  }
  munmap(shared, sizeof(RealShared));
}

}  // namespace baton
