// The flight recorder: what it keeps, what it says, and that events written at once stay whole.
#include "collectives/executor/flight_recorder.h"

#include <mutex>
#include <nlohmann/json.hpp>

#include "tests/temporary_folder.h"
#include "tests/test.h"

namespace baton::collectives::executor {
namespace {

FlightEvent numbered(uint64_t number) {
  return {.at = Time(number),
          .kind = FlightEvent::Kind::kSend,
          .peer = static_cast<uint32_t>(number),
          .sequence = number,
          .piece = static_cast<uint32_t>(3 * number),
          .step = static_cast<uint32_t>(5 * number),
          .bytes = 7 * number};
}

bool whole(const FlightEvent& event) {
  const FlightEvent expected = numbered(event.sequence);
  return event.at == expected.at && event.peer == expected.peer && event.piece == expected.piece &&
         event.step == expected.step && event.bytes == expected.bytes;
}

TEST(FlightRecorder, KeepsTheLastEventsOldestFirst) {
  FlightRecorder recorder(0, 8);
  EXPECT_TRUE(recorder.events().empty());
  EXPECT_EQ("", recorder.text());
  for (uint64_t number = 1; number <= 5; ++number) recorder.record(numbered(number));
  EXPECT_EQ(5, recorder.events().size());
  for (uint64_t number = 6; number <= 21; ++number) recorder.record(numbered(number));
  const auto events = recorder.events();
  ASSERT_EQ(8, events.size());
  for (size_t i = 0; i < events.size(); ++i) {
    EXPECT_EQ(14 + i, events[i].sequence);
    EXPECT_TRUE(whole(events[i]));
  }
}

TEST(FlightRecorder, SaysEachEventInALine) {
  FlightRecorder recorder(1);
  recorder.record({.at = std::chrono::microseconds(12345678),
                   .kind = FlightEvent::Kind::kSend,
                   .collective = Collective::kAllReduce,
                   .lane = 4,
                   .peer = 0,
                   .sequence = 17,
                   .piece = 3,
                   .step = 2,
                   .bytes = 512 << 10});
  recorder.record({.at = std::chrono::seconds(13),
                   .kind = FlightEvent::Kind::kCallEnd,
                   .collective = Collective::kBarrier,
                   .status = static_cast<uint8_t>(absl::StatusCode::kDeadlineExceeded),
                   .sequence = 18});
  recorder.record(
      {.at = std::chrono::seconds(14), .kind = FlightEvent::Kind::kPeerLost, .peer = 2});
  EXPECT_EQ(
      "12.345678 rank 1 send    all_reduce #17 chunk 3 step 2 lane 4 -> rank 0 512.0 KiB\n"
      "13.000000 rank 1 end     barrier #18 DEADLINE_EXCEEDED\n"
      "14.000000 rank 1 lost    all_reduce #0 of rank 2\n",
      recorder.text());

  const auto json = nlohmann::json::parse(recorder.to_json());
  EXPECT_EQ(1, json["rank"]);
  ASSERT_EQ(3, json["events"].size());
  EXPECT_EQ(nlohmann::json({{"at", 12.345678},
                            {"kind", "send"},
                            {"collective", "all_reduce"},
                            {"sequence", 17},
                            {"piece", 3},
                            {"step", 2},
                            {"lane", 4},
                            {"peer", 0},
                            {"bytes", 512 << 10}}),
            json["events"][0]);
  EXPECT_EQ("DEADLINE_EXCEEDED", json["events"][1]["status"]);
  EXPECT_FALSE(json["events"][1].contains("peer"));
}

TEST(FlightRecorder, EventsAreWholeWhileThreadsTakeTurnsToWriteAndOneReads) {
  constexpr int kWriters = 4;
  constexpr uint64_t kEach = 20000;
  FlightRecorder recorder(0, 4);  // so small that the writers overtake the reader
  std::mutex turn;
  std::atomic<int> writing{kWriters};
  std::vector<std::thread> writers;
  for (int writer = 0; writer < kWriters; ++writer) {
    writers.emplace_back([&, writer] {
      for (uint64_t i = 0; i < kEach; ++i) {
        std::lock_guard lock(turn);
        recorder.record(numbered(i * kWriters + writer));
      }
      --writing;
    });
  }
  size_t read = 0;
  size_t torn = 0;
  while (writing > 0) {
    for (const FlightEvent& event : recorder.events()) {
      ++read;
      torn += whole(event) ? 0 : 1;
    }
  }
  for (auto& writer : writers) writer.join();
  EXPECT_EQ(0, torn) << "of " << read;
  for (const FlightEvent& event : recorder.events()) EXPECT_TRUE(whole(event));
  EXPECT_LE(recorder.events().size(), 4);
}

TEST(FlightDump, HasANameOfItsOwnForEveryUserGroupAndRank) {
  unsetenv("BATON_FLIGHT_RECORDER");
  EXPECT_THAT(flight_path("my/group", 3),
              testing::EndsWith("/baton-flight-" + std::to_string(geteuid()) + "-my_group.3.json"));
  setenv("BATON_FLIGHT_RECORDER", "/somewhere/else", 1);
  EXPECT_EQ(flight_path("world", 3), "/somewhere/else.3.json");
  setenv("BATON_FLIGHT_RECORDER", "none", 1);
  EXPECT_EQ(flight_path("world", 3), "");
}

TEST(FlightDump, IsJsonOfThisUserAndReplacesTheLastOne) {
  FlightRecorder recorder(0, 8);
  recorder.record(numbered(1));
  const TemporaryFolder folder;
  const std::string path = folder.path("flight");
  for (int round = 0; round < 2; ++round) {
    EXPECT_EQ(dump_flight_record(recorder, path), "; its last events are in " + path);
    const auto json = nlohmann::json::parse(std::ifstream(path));
    EXPECT_EQ(json["events"].size(), 1u);
  }
  struct stat status {};
  ASSERT_EQ(stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
  EXPECT_EQ(dump_flight_record(recorder, ""), "");

  const std::string link = path + "_link";
  ASSERT_EQ(symlink(path.c_str(), link.c_str()), 0);
  EXPECT_THAT(dump_flight_record(recorder, link), testing::HasSubstr("could not be written"));
  EXPECT_THAT(dump_flight_record(recorder, "/no/such/directory/x"),
              testing::HasSubstr("BATON_FLIGHT_RECORDER"));
}

}  // namespace
}  // namespace baton::collectives::executor
