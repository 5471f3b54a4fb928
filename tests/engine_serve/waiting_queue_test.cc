// The sums of the queue beside those of a walk through it.
#include "engine/serve/waiting_queue.h"
#include "tests/test.h"

namespace baton::engine::serve {
namespace {

TEST(WaitingQueue, SumsAreThoseOfAWalk) {
  std::mt19937 random(1);
  WaitingQueue queue;
  std::vector<std::unique_ptr<Sequence>> inside;  // in the order of the queue
  for (int event = 0; event < 5000; ++event) {
    const uint32_t kind = random() % 8;
    if (kind < 4 || inside.empty()) {
      auto made = std::make_unique<Sequence>();
      made->prompt_tokens = 1 + random() % 50;
      made->tokens.resize(made->prompt_tokens + (kind == 0 ? random() % 40 : 0));
      made->request.sampling.max_tokens = 1 + static_cast<int>(random() % 90);
      if (kind == 1) made->job.emplace();
      const bool first = random() % 4 == 0;
      first ? queue.push_front(made.get()) : queue.push_back(made.get());
      inside.insert(first ? inside.begin() : inside.end(), std::move(made));
    } else if (kind == 4) {
      ASSERT_EQ(queue.front(), inside.front().get());
      queue.pop_front();
      inside.erase(inside.begin());
    } else {
      const auto victim = inside.begin() + random() % inside.size();
      queue.erase(victim->get());
      queue.erase(victim->get());  // it is not in there any more
      inside.erase(victim);
    }
    size_t prompt = 0;
    for (const auto& sequence : inside) prompt += sequence->job ? 0 : sequence->remaining();
    ASSERT_EQ(queue.prompt_tokens(), prompt);
    ASSERT_EQ(queue.size(), inside.size());
    for (const size_t mean : {size_t{0}, size_t{1}, size_t{30}, size_t{64}, size_t{1000}}) {
      size_t output = 0;
      for (const auto& sequence : inside) {
        output += sequence->job ? 0 : expected_output(*sequence, mean);
      }
      ASSERT_EQ(queue.output_tokens(mean), output) << mean;
    }
  }
}

TEST(WaitingQueue, AtLeastOneTokenIsExpected) {
  Sequence sequence;
  sequence.prompt_tokens = 2;
  sequence.tokens.resize(2);
  sequence.request.sampling.max_tokens = 10;
  EXPECT_EQ(expected_output(sequence, 64), 10u);
  EXPECT_EQ(expected_output(sequence, 6), 6u);
  sequence.tokens.resize(12);
  EXPECT_EQ(expected_output(sequence, 64), 1u);
}

}  // namespace
}  // namespace baton::engine::serve
