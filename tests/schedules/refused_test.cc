// Broken schedules are refused, with an error that names the rank and the step.
#include "collectives/schedules/schedule.h"
#include "tests/schedules/verify.h"
#include "tests/test.h"

namespace baton::collectives::schedules {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using Kind = Step::Kind;
using Edit = std::function<void(uint32_t rank, Program& program)>;

// What the verifier says to a schedule that somebody has edited.
std::string refusal(const ScheduleSpec& spec, const Edit& edit) {
  const auto report = proof::verify(spec, [&](uint32_t rank, uint32_t channel) {
    absl::StatusOr<Program> program = write_program(spec, rank, channel);
    if (program.ok()) edit(rank, *program);
    return program;
  });
  return report.ok() ? "accepted" : std::string(report.status().message());
}

// Of one rank's program.
Edit at(uint32_t rank, const std::function<void(std::vector<Step>& steps)>& edit) {
  return [rank, edit](uint32_t r, Program& program) {
    if (r == rank) edit(program.steps);
  };
}

// Steps of ring all_reduce with n = 4: send, receive_reduce (x 3), send, receive (x 3).
ScheduleSpec ring() { return {.algorithm = Algorithm::kRing, .ranks = 4}; }

TEST(Refused, NothingIfNothingIsChanged) {
  EXPECT_EQ(refusal(ring(), [](uint32_t, Program&) {}), "accepted");
}

TEST(Refused, MissingSend) {
  EXPECT_THAT(refusal(ring(), at(1, [](auto& s) { s.erase(s.begin() + 10); })),
              AllOf(HasSubstr("rank 2"), HasSubstr("step 11 (receive)"), HasSubstr("channel 0"),
                    HasSubstr("a message from rank 1")));
}

TEST(Refused, MissingReceive) {
  EXPECT_THAT(refusal(ring(), at(2, [](auto& s) { s.erase(s.begin() + 11); })),
              AllOf(HasSubstr("rank 1"), HasSubstr("step 10 (send)"), HasSubstr("never receives")));
}

TEST(Refused, WrongPeer) {
  EXPECT_THAT(refusal(ring(), at(1, [](auto& s) { s[0].peer = 3; })),
              AllOf(HasSubstr("rank "), HasSubstr("step ")));
  EXPECT_THAT(refusal(ring(), at(1, [](auto& s) { s[0].peer = 9; })),
              AllOf(HasSubstr("rank 1"), HasSubstr("step 0"), HasSubstr("no peer 9")));
  EXPECT_THAT(refusal(ring(), at(1, [](auto& s) { s[0].peer = 1; })),
              AllOf(HasSubstr("rank 1"), HasSubstr("step 0"), HasSubstr("no peer 1")));
}

TEST(Refused, MessageOfAnotherSize) {
  const ScheduleSpec spec{.algorithm = Algorithm::kHalvingDoubling, .ranks = 4};
  EXPECT_THAT(refusal(spec, at(0, [](auto& s) { s[0].parts = 1; })),
              AllOf(HasSubstr("rank 2"), HasSubstr("step 1 (receive_reduce)"),
                    HasSubstr("expects 2 parts from rank 0, whose step 0 sends 1")));
}

TEST(Refused, MessageLargerThanPromised) {
  EXPECT_THAT(refusal(ring(), at(0, [](auto& s) { s[0].parts = 2, s[0].source.part = 0; })),
              AllOf(HasSubstr("rank 0"), HasSubstr("step 0"), HasSubstr("at most 1")));
}

TEST(Refused, ContributionTakenTwice) {
  // Rank 0 combines what it got with itself, in an added step.
  const Edit twice = at(0, [](std::vector<Step>& s) {
    s.insert(s.begin() + 2, {.kind = Kind::kReduce,
                             .source = {BufferName::kInput, s[1].target.part},
                             .target = s[1].target});
  });
  EXPECT_THAT(refusal(ring(), twice),
              AllOf(HasSubstr("rank 0"), HasSubstr("step 2 (reduce)"), HasSubstr("twice")));
}

TEST(Refused, PartsMixedUp) {
  EXPECT_THAT(refusal(ring(), at(0, [](auto& s) { s[1].source.part ^= 1; })),
              AllOf(HasSubstr("rank 0"), HasSubstr("step 1"), HasSubstr("different parts")));
}

TEST(Refused, ReadBeforeWritten) {
  EXPECT_THAT(refusal(ring(), at(3, [](auto& s) { s[0].source.buffer = BufferName::kOutput; })),
              AllOf(HasSubstr("rank 3"), HasSubstr("step 0 (send)"),
                    HasSubstr("before anything is there")));
}

TEST(Refused, OutsideOfItsBuffers) {
  EXPECT_THAT(refusal(ring(), at(3,
                                 [](auto& s) {
                                   s[1].target = {BufferName::kScratch, 0};
                                 })),
              AllOf(HasSubstr("rank 3"), HasSubstr("step 1"), HasSubstr("outside its 0 parts")));
  EXPECT_THAT(refusal(ring(), at(3, [](auto& s) { s[1].target.buffer = BufferName::kInput; })),
              AllOf(HasSubstr("rank 3"), HasSubstr("step 1"), HasSubstr("writes to the input")));
  const ScheduleSpec reduce{
      .collective = Collective::kReduce, .algorithm = Algorithm::kRing, .ranks = 3};
  EXPECT_THAT(refusal(reduce, at(1,
                                 [](auto& s) {
                                   for (Step& step : s) step.target = {BufferName::kOutput, 0};
                                 })),
              AllOf(HasSubstr("rank 1"), HasSubstr("no output part 0")));
}

TEST(Refused, EverybodyWaitsForEverybody) {
  const Edit receive_first = [](uint32_t, Program& p) { std::swap(p.steps[0], p.steps[1]); };
  EXPECT_THAT(refusal(ring(), receive_first),
              AllOf(HasSubstr("rank 0"), HasSubstr("step 0 (receive_reduce)"),
                    HasSubstr("waits for ever for a message from rank 3")));
}

TEST(Refused, MoreMessagesAheadThanThereIsRoomFor) {
  const ScheduleSpec spec{.algorithm = Algorithm::kDirect, .ranks = 2};
  const Edit burst = [](uint32_t, Program& p) { p.steps.insert(p.steps.begin(), 2, p.steps[0]); };
  EXPECT_THAT(refusal(spec, burst),
              AllOf(HasSubstr("step 2 (send)"), HasSubstr("waits for ever to send")));
}

TEST(Refused, OverwritingWhatEverybodyStillReads) {
  // Both send what both overwrite at once. With separate buffers that is right, in place it waits.
  const ScheduleSpec spec{.algorithm = Algorithm::kRecursiveDoubling, .ranks = 2};
  const auto exchange = [](uint32_t rank, Program& p) {
    p.steps = {{.kind = Kind::kSend, .peer = 1 - rank},
               {.kind = Kind::kReceiveReduce,
                .final = true,
                .peer = 1 - rank,
                .target = {BufferName::kOutput, 0}}};
  };
  EXPECT_THAT(refusal(spec, exchange), AllOf(HasSubstr("in place"), HasSubstr("step 1"),
                                             HasSubstr("waits for ever"), HasSubstr("overwrite")));
  ScheduleSpec separate = spec;
  separate.separate = true;
  EXPECT_EQ(refusal(separate, exchange), "accepted");
}

TEST(Refused, InputNeededAfterItIsOverwritten) {
  // Right with separate buffers; in place the first step destroys what the third one sends.
  const ScheduleSpec spec{
      .collective = Collective::kAllGather, .algorithm = Algorithm::kDirect, .ranks = 2};
  const Place in{BufferName::kInput, 0}, out{BufferName::kOutput, 0}, other{BufferName::kOutput, 1};
  const Edit late = at(0, [&](std::vector<Step>& s) {
    s = {{.kind = Kind::kReceive, .peer = 1, .target = out},
         {.kind = Kind::kCopy, .source = out, .target = other},
         {.kind = Kind::kSend, .peer = 1, .source = in},
         {.kind = Kind::kCopy, .source = in, .target = out}};
  });
  EXPECT_THAT(refusal(spec, late), AllOf(HasSubstr("in place"), HasSubstr("rank 0"),
                                         HasSubstr("output part 0 with other contributions")));
}

TEST(Refused, FinalMissingOrTooEarly) {
  EXPECT_THAT(refusal(ring(), at(2, [](auto& s) { s[5].final = false; })),
              AllOf(HasSubstr("no final combination"), HasSubstr("rank 0"), HasSubstr("step ")));
  EXPECT_THAT(refusal(ring(), at(2, [](auto& s) { s[1].final = true; })),
              AllOf(HasSubstr("rank 3"), HasSubstr("step 3"), HasSubstr("after its final")));
  EXPECT_THAT(refusal(ring(), at(2, [](auto& s) { s[0].final = true; })),
              AllOf(HasSubstr("rank 2"), HasSubstr("step 0"), HasSubstr("combines nothing")));
}

TEST(Refused, ResultNotWritten) {
  const ScheduleSpec spec{
      .collective = Collective::kAllToAll, .algorithm = Algorithm::kDirect, .ranks = 3};
  const Edit no_copy = at(1, [](std::vector<Step>& s) {
    for (size_t i = 0; i < s.size(); ++i) {
      if (s[i].kind == Kind::kCopy) s.erase(s.begin() + i);
    }
  });
  EXPECT_THAT(refusal(spec, no_copy), AllOf(HasSubstr("rank 1"), HasSubstr("never written")));
}

TEST(Refused, OrderedContributionsOutOfOrder) {
  const ScheduleSpec spec{.algorithm = Algorithm::kDirect, .ranks = 4, .ordered = true};
  const Edit swapped = at(0, [](std::vector<Step>& s) { std::swap(s[3].target, s[4].target); });
  EXPECT_THAT(refusal(spec, swapped),
              AllOf(HasSubstr("rank 0"), HasSubstr("(fold)"), HasSubstr("not in its place")));
  // Sums that depend on who met whom are not ordered, however complete.
  const auto unordered = proof::verify(spec, [](uint32_t rank, uint32_t channel) {
    return write_program({.algorithm = Algorithm::kDirect, .ranks = 4}, rank, channel);
  });
  EXPECT_THAT(std::string(unordered.status().message()), HasSubstr("only folds"));
}

TEST(Refused, FingerprintsSeeItToo) {
  ScheduleSpec spec = ring();
  spec.ranks = 100;
  const Edit twice = at(7, [](std::vector<Step>& s) {
    for (size_t i = s.size(); i-- > 0;) {
      if (s[i].kind != Kind::kReceiveReduce || s[i].final) continue;
      s.insert(s.begin() + i + 1, {.kind = Kind::kReduce,
                                   .source = {BufferName::kInput, s[i].target.part},
                                   .target = s[i].target});
    }
  });
  EXPECT_THAT(refusal(spec, twice),
              AllOf(HasSubstr("rank "), HasSubstr("step "), HasSubstr("other contributions")));
}

}  // namespace
}  // namespace baton::collectives::schedules
