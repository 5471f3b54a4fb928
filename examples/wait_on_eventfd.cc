// Sleep in your own poll loop: a ProgressThread moves the bytes, an eventfd says when to look.
#include <poll.h>
#include <unistd.h>

#include <cstdio>
#include <vector>

#include "transport/progress_thread.h"
#include "transport/worker.h"

using namespace baton;

int main() {
  auto source = Worker::create({.name = "source"}).value();
  auto target = Worker::create({.name = "target"}).value();
  ProgressThread source_thread(*source), target_thread(*target);
  auto pool = MemoryPool::create(*source).value();
  auto other = MemoryPool::create(*target).value();
  Block from = pool->allocate(1 << 20).value(), to = other->allocate(1 << 20).value();
  from.data[12345] = std::byte{42};

  PeerId peer = source->connect(target->address()).value();
  TransferId id = source
                      ->submit({.peer = peer,
                                .local = from.region,
                                .local_layout = Layout::contiguous(from.offset, from.size),
                                .remote = target->remote_region(to.region).value(),
                                .remote_layout = Layout::contiguous(to.offset, to.size),
                                .notify = "one megabyte for you"})
                      .value();

  Notification note;
  bool sent = false, received = false;
  while (!sent || !received) {
    pollfd fds[] = {{source->event_fd(), POLLIN, 0}, {target->event_fd(), POLLIN, 0}};
    poll(fds, 2, -1);
    for (const pollfd& fd : fds) {
      uint64_t events = 0;  // reading clears it
      if (fd.revents != 0 && read(fd.fd, &events, sizeof events) < 0) return 1;
    }
    if (!sent && ended(source->state(id).value())) {
      std::printf("source: %s\n", source->status(id).ToString().c_str());
      sent = source->release(id).ok();
    }
    if (!received && target->next_notification(note)) {
      std::printf("target: \"%s\", byte 12345 is %d\n", note.payload.c_str(), int(to.data[12345]));
      received = true;
    }
  }
  return to.data[12345] == std::byte{42} ? 0 : 1;
}
