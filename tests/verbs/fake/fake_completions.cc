// The fake's completion queues, and the channels that wake whoever waits for them.
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>

#include "tests/verbs/fake/fake_objects.h"

namespace baton {

struct FakeCompletionCalls : FakeCall {
  static ibv_comp_channel* create_comp_channel(ibv_context* context) {
    const Locked fake(context);
    auto* made = new FakeChannel;
    made->channel.context = context;
    made->channel.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK | EFD_SEMAPHORE);
    ++fake_of_context(context).users;
    ++fake->objects_;
    return &made->channel;
  }
  static int destroy_comp_channel(ibv_comp_channel* channel) {
    const Locked fake(channel->context);
    if (channel->refcnt != 0) fake->violation("a completion channel freed while in use");
    ::close(channel->fd);
    --fake_of_context(channel->context).users;
    --fake->objects_;
    delete &fake_of<FakeChannel>(channel);
    return 0;
  }
  static int get_cq_event(ibv_comp_channel* channel, ibv_cq** queue, void** context) {
    const Locked fake(channel->context);
    auto& events = fake_of<FakeChannel>(channel).events;
    if (!take_count(channel->fd) || events.empty()) {
      errno = EAGAIN;
      return -1;
    }
    *queue = events.front();
    *context = (*queue)->cq_context;
    events.pop_front();
    return 0;
  }
  static void ack_cq_events(ibv_cq*, unsigned) {}
  static ibv_cq* create_cq(ibv_context* context, int entries, void* user, ibv_comp_channel* channel,
                           int) {
    const Locked fake(context);
    if (entries < 1 || entries > 2 * fake->options_.max_work) return failed(EINVAL);
    auto* made = new FakeCq;
    made->cq.context = context;
    made->cq.cq_context = user;
    made->cq.cqe = entries;
    made->cq.channel = channel;
    if (channel != nullptr) ++channel->refcnt;
    fake->completion_queues_.push_back(made);
    ++fake_of_context(context).users;
    ++fake->objects_;
    return &made->cq;
  }
  static int destroy_cq(ibv_cq* queue) {
    const Locked fake(queue->context);
    auto& cq = fake_of<FakeCq>(queue);
    if (cq.users != 0) fake->violation("a completion queue freed while a queue pair uses it");
    if (queue->channel != nullptr) {
      --queue->channel->refcnt;
      fake_of<FakeChannel>(queue->channel).events.remove_if([&](ibv_cq* each) {
        return each == queue && take_count(queue->channel->fd);
      });
    }
    std::erase(fake->completion_queues_, &cq);
    --fake_of_context(queue->context).users;
    --fake->objects_;
    delete &cq;
    return 0;
  }
  static int poll_cq(ibv_cq* queue, int most, ibv_wc* out) {
    const Locked fake(queue->context);
    fake->run(fake->options_.bytes_per_poll);
    auto& cq = fake_of<FakeCq>(queue);
    fake->let_go(cq);
    if (cq.broken) return 0;
    int count = 0;
    for (; count < most && !cq.entries.empty(); ++count) {
      const FakeCq::Entry& entry = cq.entries.front();
      out[count] = entry.completion;
      if (entry.qp != nullptr) entry.qp->used -= entry.retires;
      cq.entries.pop_front();
    }
    return count;
  }
  static int req_notify_cq(ibv_cq* queue, int) {
    const Locked fake(queue->context);
    fake_of<FakeCq>(queue).armed = true;
    fake->run(SIZE_MAX);
    return 0;
  }
};

void add_completion_calls(verbs::VerbsApi& api) {
  using Calls = FakeCompletionCalls;
  api.ibv_create_comp_channel = Calls::create_comp_channel;
  api.ibv_destroy_comp_channel = Calls::destroy_comp_channel;
  api.ibv_get_cq_event = Calls::get_cq_event;
  api.ibv_ack_cq_events = Calls::ack_cq_events;
  api.ibv_create_cq = Calls::create_cq;
  api.ibv_destroy_cq = Calls::destroy_cq;
}

void add_completion_calls(ibv_context_ops& ops) {
  ops.poll_cq = FakeCompletionCalls::poll_cq;
  ops.req_notify_cq = FakeCompletionCalls::req_notify_cq;
}

}  // namespace baton
