// Two processes hand over pages: decode offers memory, prefill writes straight into it.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>

#include "transport/progress_thread.h"
#include "transport/worker.h"

using namespace baton;
constexpr size_t kPage = 16 << 10;

int prefill(int address_pipe) {
  auto worker = Worker::create({.name = "prefill"}).value();
  auto pool = MemoryPool::create(*worker).value();
  Block pages = pool->allocate(8 * kPage).value();
  for (size_t i = 0; i < pages.size; ++i) pages.data[i] = std::byte(i / kPage);
  dprintf(address_pipe, "%s", worker->address().c_str());
  close(address_pipe);

  Notification offer;  // decode says where its pages are and which counter to raise
  worker->wait_until([&] { return worker->next_notification(offer); }).IgnoreError();
  const uint32_t mine[] = {0, 2, 4}, theirs[] = {5, 1, 3};  // page numbers, in any order
  TransferRequest write{.op = Op::kWrite, .peer = offer.peer, .local = pages.region};
  write.local_layout = Layout::paged(pages.offset, mine, kPage, kPage);
  write.remote = RemoteRegion::decode(offer.payload.substr(0, 48)).value();
  write.remote_layout = Layout::paged(0, theirs, kPage, kPage);
  write.counter = RemoteCounter::decode(offer.payload.substr(48)).value();
  const absl::Status status = worker->wait(worker->submit(write).value());
  std::printf("prefill: %s, %s\n", status.ToString().c_str(), worker->explain(offer.peer).c_str());
  return status.ok() ? 0 : 1;
}

int decode(const char* address) {
  auto worker = Worker::create({.name = "decode"}).value();
  ProgressThread thread(*worker);  // acknowledges what arrives, whatever this thread does
  auto pool = MemoryPool::create(*worker).value();
  Block pages = pool->allocate(8 * kPage).value();  // the first block of a pool is at offset 0
  CounterId arrived = worker->allocate_counter().value();
  PeerId peer = worker->connect(address).value();
  const std::string offer = worker->remote_region(pages.region).value().encode() +
                            worker->remote_counter(arrived).encode();
  worker->notify_detached(peer, offer).IgnoreError();
  worker->wait_until([&] { return worker->counter_value(arrived) == 1; }).IgnoreError();
  for (int page : {5, 1, 3}) std::printf("decode: %d\n", int(pages.data[page * kPage]));
  int prefill_failed = 1;
  wait(&prefill_failed);
  return prefill_failed == 0 && pages.data[3 * kPage] == std::byte{4} ? 0 : 1;
}

int main() {
  int fds[2];
  char address[4096] = {};
  if (pipe(fds) != 0) return 1;
  if (fork() == 0) return prefill(fds[1]);
  return read(fds[0], address, sizeof address - 1) > 0 ? decode(address) : 1;
}
