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

using Steps = std::vector<Step>;
using Change = void (*)(Steps& steps);

// One rank's program is changed in one place.
TEST(Refused, WithItsPlaceAndReason) {
  const ScheduleSpec halving{.algorithm = Algorithm::kHalvingDoubling, .ranks = 4};
  const ScheduleSpec reduce{
      .collective = Collective::kReduce, .algorithm = Algorithm::kRing, .ranks = 3};
  const struct {
    ScheduleSpec spec;
    uint32_t rank;
    Change change;
    std::vector<const char*> says;
  } cases[] = {
      {ring(), 0, [](Steps&) {}, {"accepted"}},
      {ring(),
       1,
       [](Steps& s) { s.erase(s.begin() + 10); },
       {"rank 2", "step 11 (receive)", "channel 0", "a message from rank 1"}},
      {ring(),
       2,
       [](Steps& s) { s.erase(s.begin() + 11); },
       {"rank 1", "step 10 (send)", "never receives"}},
      {ring(), 1, [](Steps& s) { s[0].peer = 3; }, {"rank ", "step "}},
      {ring(), 1, [](Steps& s) { s[0].peer = 9; }, {"rank 1", "step 0", "no peer 9"}},
      {ring(), 1, [](Steps& s) { s[0].peer = 1; }, {"rank 1", "step 0", "no peer 1"}},
      {halving,
       0,
       [](Steps& s) { s[0].parts = 1; },
       {"rank 2", "step 1 (receive_reduce)", "expects 2 parts from rank 0, whose step 0 sends 1"}},
      {ring(),
       0,
       [](Steps& s) { s[0].parts = 2, s[0].source.part = 0; },
       {"rank 0", "step 0", "at most 1"}},
      // Rank 0 combines what it got with itself, in an added step.
      {ring(),
       0,
       [](Steps& s) {
         s.insert(s.begin() + 2, {.kind = Kind::kReduce,
                                  .source = {BufferName::kInput, s[1].target.part},
                                  .target = s[1].target});
       },
       {"rank 0", "step 2 (reduce)", "twice"}},
      {ring(), 0, [](Steps& s) { s[1].source.part ^= 1; }, {"rank 0", "step 1", "different parts"}},
      {ring(),
       3,
       [](Steps& s) { s[0].source.buffer = BufferName::kOutput; },
       {"rank 3", "step 0 (send)", "before anything is there"}},
      {ring(),
       3,
       [](Steps& s) {
         s[1].target = {BufferName::kScratch, 0};
       },
       {"rank 3", "step 1", "outside its 0 parts"}},
      {ring(),
       3,
       [](Steps& s) { s[1].target.buffer = BufferName::kInput; },
       {"rank 3", "step 1", "writes to the input"}},
      {reduce,
       1,
       [](Steps& s) {
         for (Step& step : s) step.target = {BufferName::kOutput, 0};
       },
       {"rank 1", "no output part 0"}},
      {ring(),
       2,
       [](Steps& s) { s[5].final = false; },
       {"no final combination", "rank 0", "step "}},
      {ring(), 2, [](Steps& s) { s[1].final = true; }, {"rank 3", "step 3", "after its final"}},
      {ring(), 2, [](Steps& s) { s[0].final = true; }, {"rank 2", "step 0", "combines nothing"}},
  };
  for (const auto& [spec, rank, change, says] : cases) {
    const std::string why = refusal(spec, at(rank, change));
    for (const char* part : says) EXPECT_THAT(why, HasSubstr(part));
  }
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
