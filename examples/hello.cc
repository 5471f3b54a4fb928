// Two processes: the child writes into the parent's memory.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "transport/progress_thread.h"
#include "transport/worker.h"
using namespace baton;

int main() {
  int ends[2];
  if (pipe(ends) != 0) return 1;
  const bool child = fork() == 0;
  auto worker = Worker::create({.name = child ? "child" : "parent"}).value();
  ProgressThread thread(*worker);                   // moves the bytes
  auto pool = MemoryPool::create(*worker).value();  // registered once, here
  Block page = pool->allocate(4096).value();
  TransferRequest put{.local = page.region, .local_layout = Layout::contiguous(page.offset, 4096)};
  if (child) {
    char offer[4096] = {};  // the parent's region, 48 bytes, and its address
    if (read(ends[0], offer, sizeof offer - 1) < 48) return 1;
    std::strcpy((char*)page.data, "hello from another process");
    put.peer = worker->connect(offer + 48).value();
    put.remote = RemoteRegion::decode({offer, 48}).value();
    put.remote_layout = Layout::contiguous(0, 4096);  // its first block
    put.notify = "4096 bytes are here";
    return worker->wait(worker->submit(put).value()).ok() ? 0 : 1;
  }
  std::string offer = worker->remote_region(page.region).value().encode() + worker->address();
  if (write(ends[1], offer.data(), offer.size()) < 0) return 1;
  Notification note;  // comes when every byte is visible
  worker->wait_until([&] { return worker->next_notification(note); }).IgnoreError();
  std::printf("%s: %s\n", note.payload.c_str(), (char*)page.data);
  int failed = 1;
  return wait(&failed) > 0 && failed == 0 ? 0 : 1;
}
