// A transfer over a provider of your own: loopback_provider.cc, which this program is linked with.
#include <cstdio>
#include <cstring>
#include <vector>

#include "transport/progress_thread.h"
#include "transport/worker.h"

using namespace baton;

int main() {
  auto source = Worker::create({.name = "source", .require = "loopback"}).value();
  auto target = Worker::create({.name = "target", .require = "loopback"}).value();
  ProgressThread target_thread(*target);
  auto pool = MemoryPool::create(*source).value(), other = MemoryPool::create(*target).value();
  constexpr size_t kPage = 16 << 10, kPages = 256;
  Block from = pool->allocate(kPages * kPage).value(), to = other->allocate(kPages * kPage).value();
  std::memset(from.data, 7, from.size);
  std::vector<uint32_t> even;
  for (uint32_t page = 0; page < kPages; page += 2) even.push_back(page);

  const CounterId counter = target->allocate_counter().value();
  TransferRequest request{.peer = source->connect(target->address()).value(),
                          .local = from.region,
                          .local_layout = Layout::contiguous(from.offset, even.size() * kPage),
                          .remote = target->remote_region(to.region).value(),
                          .remote_layout = Layout::paged(to.offset, even, kPage, kPage),
                          .counter = target->remote_counter(counter)};
  const absl::Status written = source->wait(source->submit(request).value());
  bool right = written.ok() && target->counter_value(counter) == 1;
  for (size_t i = 0; i < kPages * kPage; ++i) {
    right = right && to.data[i] == std::byte(i / kPage % 2 == 0 ? 7 : 0);
  }
  std::printf("%s over %s: %s\n", written.ToString().c_str(), source->explain(request.peer).c_str(),
              right ? "every byte is right" : "WRONG");

  request.remote.key ^= 1;  // forged
  const absl::Status refused = source->wait(source->submit(request).value());
  std::printf("with a forged key: %s\n", refused.ToString().c_str());
  return right && !refused.ok() && target->counter_value(counter) == 1 ? 0 : 1;
}
