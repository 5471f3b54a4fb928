// Cancel a transfer and reuse its pages at once: after the end no byte of it moves any more.
#include <cstdio>
#include <cstring>

#include "transport/progress_thread.h"
#include "transport/worker.h"

using namespace baton;

int main() {
  auto source = Worker::create({.name = "source"}).value();
  auto target = Worker::create({.name = "target"}).value();
  ProgressThread target_thread(*target);
  auto pool = MemoryPool::create(*source).value();
  auto other = MemoryPool::create(*target).value();
  constexpr size_t kBytes = 256 << 20;
  Block from = pool->allocate(kBytes).value(), to = other->allocate(kBytes).value();
  std::memset(from.data, 1, kBytes);

  PeerId peer = source->connect(target->address()).value();
  const TransferRequest request{.peer = peer,
                                .local = from.region,
                                .local_layout = Layout::contiguous(from.offset, kBytes),
                                .remote = target->remote_region(to.region).value(),
                                .remote_layout = Layout::contiguous(to.offset, kBytes)};
  TransferId id = source->submit(request).value();
  while (to.data[0] == std::byte{0}) source->progress();  // it is under way

  source->cancel(id).IgnoreError();             // asks
  const absl::Status ended = source->wait(id);  // ended: nothing moves from here on
  std::printf("the transfer ended: %s\n", ended.ToString().c_str());

  std::memset(from.data, 2, kBytes);  // both sides are free again
  std::memset(to.data, 3, kBytes);
  for (int i = 0; i < 100000; ++i) source->progress();
  for (size_t i = 0; i < kBytes; ++i) {
    if (to.data[i] != std::byte{3}) return std::printf("byte %zu moved after the end\n", i), 1;
  }
  std::printf("no byte moved after it; the id is stale now: %s\n",
              source->state(id).status().ToString().c_str());
  return 0;
}
