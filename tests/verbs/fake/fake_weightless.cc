// The fake without weight: work is done as soon as it is posted, and nothing moves. What is left of
// a transfer's cost is Baton's own.
#include <algorithm>

#include "tests/verbs/fake/fake_objects.h"

namespace baton {
namespace {

std::chrono::steady_clock::time_point* doorbell_at = nullptr;

int post_send(ibv_qp* handle, ibv_send_wr* request, ibv_send_wr**) {
  if (doorbell_at != nullptr) *doorbell_at = std::chrono::steady_clock::now();
  FakeCq& queue = fake_of<FakeQp>(handle).send_queue();
  for (; request != nullptr; request = request->next) {
    if ((request->send_flags & IBV_SEND_SIGNALED) == 0) continue;
    FakeCq::Entry done;
    done.completion.wr_id = request->wr_id;
    queue.entries.push_back(done);
  }
  return 0;
}

int poll_cq(ibv_cq* handle, int most, ibv_wc* out) {
  auto& queue = fake_of<FakeCq>(handle);
  int count = 0;
  for (; count < most && !queue.entries.empty(); ++count) {
    out[count] = queue.entries.front().completion;
    queue.entries.pop_front();
  }
  return count;
}

}  // namespace

void FakeVerbs::note_doorbells(std::chrono::steady_clock::time_point* at) { doorbell_at = at; }

void FakeVerbs::become_weightless() {
  std::lock_guard lock(mutex_);
  for (const auto& context : contexts_) {
    context->context().ops.post_send = post_send;
    context->context().ops.poll_cq = poll_cq;
  }
}

}  // namespace baton
