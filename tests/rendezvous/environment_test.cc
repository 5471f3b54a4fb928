// Environments of launchers, made up.
#include "collectives/launch/environment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

namespace baton::launch {
namespace {

using testing::HasSubstr;
using Variables = std::map<std::string, std::string>;

absl::StatusOr<std::optional<Place>> place_of(const Variables& variables, uid_t user = 1000,
                                              pid_t parent = 1) {
  return place_in({.variable =
                       [&](const char* name) {
                         const auto found = variables.find(name);
                         return found == variables.end() ? nullptr : found->second.c_str();
                       },
                   .user = user,
                   .parent = parent});
}

Place found(const Variables& variables, uid_t user = 1000, pid_t parent = 1) {
  const auto place = place_of(variables, user, parent);
  EXPECT_TRUE(place.ok()) << place.status();
  EXPECT_TRUE(place.ok() && place->has_value());
  return place.ok() ? place->value_or(Place{}) : Place{};
}

void expect_refused(const Variables& variables, const std::string& names) {
  const auto place = place_of(variables);
  EXPECT_TRUE(absl::IsInvalidArgument(place.status())) << place.status();
  EXPECT_THAT(std::string(place.status().message()), HasSubstr(names));
}

Variables with(Variables variables, const Variables& more) {
  for (const auto& [name, value] : more) variables[name] = value;
  return variables;
}

void expect_place(const Place& place, int rank, int ranks, int local_rank, int local_ranks) {
  EXPECT_EQ(rank, place.rank);
  EXPECT_EQ(ranks, place.ranks);
  EXPECT_EQ(local_rank, place.local_rank);
  EXPECT_EQ(local_ranks, place.local_ranks);
}

TEST(Environment, NobodyStartedThis) {
  for (const Variables& variables :
       {Variables{}, Variables{{"RANK", "3"}}, Variables{{"BATON_RENDEZVOUS", "a:1"}},
        Variables{{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}}}) {  // the last: a batch script
    const auto place = place_of(variables);
    ASSERT_TRUE(place.ok()) << place.status();
    EXPECT_FALSE(place->has_value());
  }
}

TEST(Environment, Baton) {
  const Variables variables = {
      {"BATON_RANK", "0"}, {"BATON_RANKS", "4"}, {"BATON_RENDEZVOUS", "h:1"}, {"RANK", "x"}};
  const Place place = found(variables);
  expect_place(place, 0, 4, 0, 4);
  EXPECT_EQ("h:1", place.rendezvous);
  EXPECT_EQ("baton", place.launcher);
  EXPECT_TRUE(place.serves);
  const Place third = found(with(
      variables, {{"BATON_RANK", "3"}, {"BATON_LOCAL_RANK", "1"}, {"BATON_LOCAL_RANKS", "2"}}));
  expect_place(third, 3, 4, 1, 2);
  EXPECT_FALSE(third.serves);

  expect_refused(with(variables, {{"BATON_RANK", "4"}}), "BATON_RANK=\"4\"");
  expect_refused(with(variables, {{"BATON_RANK", "-1"}}), "BATON_RANK");
  expect_refused(with(variables, {{"BATON_RANKS", "many"}}), "BATON_RANKS=\"many\"");
  expect_refused({{"BATON_RANK", "0"}}, "BATON_RANKS");
  expect_refused({{"BATON_RANK", "0"}, {"BATON_RANKS", "2"}}, "BATON_RENDEZVOUS=HOST:PORT");
}

TEST(Environment, Torchrun) {
  const Variables variables = {{"RANK", "5"},
                               {"WORLD_SIZE", "8"},
                               {"LOCAL_RANK", "1"},
                               {"LOCAL_WORLD_SIZE", "4"},
                               {"MASTER_ADDR", "10.0.0.1"},
                               {"MASTER_PORT", "29500"}};
  const Place place = found(variables);
  expect_place(place, 5, 8, 1, 4);
  EXPECT_EQ("10.0.0.1:29500", place.rendezvous);
  EXPECT_EQ("torchrun", place.launcher);
  EXPECT_FALSE(place.serves);
  EXPECT_TRUE(found(with(variables, {{"RANK", "0"}})).serves);
  EXPECT_EQ("10.0.0.1:29501",
            found(with(variables, {{"TORCHELASTIC_USE_AGENT_STORE", "True"}})).rendezvous);
  EXPECT_EQ("[fe80::1]:29500", found(with(variables, {{"MASTER_ADDR", "fe80::1"}})).rendezvous);
  EXPECT_EQ("b:2", found(with(variables, {{"BATON_RENDEZVOUS", "b:2"}})).rendezvous);
  expect_refused(with(variables, {{"MASTER_ADDR", ""}}), "MASTER_ADDR");
  expect_refused(with(variables, {{"MASTER_PORT", "0"}}), "MASTER_PORT");
  expect_refused(with(variables, {{"LOCAL_RANK", "4"}}), "LOCAL_RANK");
}

TEST(Environment, OpenMpi) {
  const Variables variables = {{"OMPI_COMM_WORLD_RANK", "1"},
                               {"OMPI_COMM_WORLD_SIZE", "2"},
                               {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                               {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                               {"PMIX_NAMESPACE", "732495873"}};
  const Place place = found(variables);
  expect_place(place, 1, 2, 1, 2);
  EXPECT_EQ("mpirun", place.launcher);
  EXPECT_THAT(place.rendezvous, testing::StartsWith("127.0.0.1:"));
  // The same at all ranks of a job, and others for other jobs and users.
  const Place first =
      found(with(variables, {{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}}),
            1000, 2);
  EXPECT_EQ(place.rendezvous, first.rendezvous);
  EXPECT_TRUE(first.serves);
  EXPECT_NE(place.rendezvous, found(with(variables, {{"PMIX_NAMESPACE", "7"}})).rendezvous);
  EXPECT_NE(place.rendezvous, found(variables, 1001).rendezvous);

  const Variables two_hosts =
      with(variables, {{"OMPI_COMM_WORLD_LOCAL_RANK", "0"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}});
  expect_refused(two_hosts, "BATON_RENDEZVOUS=HOST:PORT");
  EXPECT_EQ("h:9", found(with(two_hosts, {{"BATON_RENDEZVOUS", "h:9"}})).rendezvous);
  EXPECT_THAT(found(with(two_hosts, {{"SLURM_JOB_NODELIST", "a[7-9]"}})).rendezvous,
              testing::StartsWith("a7:"));
}

TEST(Environment, Pmi) {
  const Variables variables = {
      {"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "2"}};
  const Place place = found(variables, 1000, 55);
  expect_place(place, 0, 2, 0, 2);
  EXPECT_TRUE(place.serves);
  EXPECT_EQ(
      place.rendezvous,
      found(with(variables, {{"PMI_RANK", "1"}, {"MPI_LOCALRANKID", "1"}}), 1000, 55).rendezvous);
  EXPECT_NE(place.rendezvous, found(variables, 1000, 56).rendezvous);
  expect_refused({{"PMI_RANK", "2"}, {"PMI_SIZE", "2"}}, "PMI_RANK");
}

TEST(Environment, Slurm) {
  const Variables variables = {{"SLURM_PROCID", "4"},
                               {"SLURM_NTASKS", "5"},
                               {"SLURM_LOCALID", "0"},
                               {"SLURM_NODEID", "2"},
                               {"SLURM_STEP_ID", "0"},
                               {"SLURM_JOB_ID", "99"},
                               {"SLURM_STEP_TASKS_PER_NODE", "2(x2),1"},
                               {"SLURM_JOB_NODELIST", "node[03-05,9]"}};
  const Place place = found(variables);
  expect_place(place, 4, 5, 0, 1);
  EXPECT_EQ("srun", place.launcher);
  EXPECT_THAT(place.rendezvous, testing::StartsWith("node03:"));
  EXPECT_FALSE(place.serves);
  const Place first = found(with(variables, {{"SLURM_PROCID", "0"}, {"SLURM_NODEID", "0"}}));
  expect_place(first, 0, 5, 0, 2);
  EXPECT_TRUE(first.serves);
  EXPECT_EQ(place.rendezvous, first.rendezvous);

  const Variables one_host =
      with(variables, {{"SLURM_NODEID", "0"}, {"SLURM_STEP_TASKS_PER_NODE", "5"}});
  EXPECT_THAT(found(one_host).rendezvous, testing::StartsWith("127.0.0.1:"));
  EXPECT_EQ("", found(with(one_host, {{"SLURM_PROCID", "0"},
                                      {"SLURM_NTASKS", "1"},
                                      {"SLURM_STEP_TASKS_PER_NODE", "1"}}))
                    .rendezvous);
  expect_refused(with(variables, {{"SLURM_JOB_NODELIST", "node[03-"}}), "SLURM_JOB_NODELIST");
  expect_refused(with(variables, {{"SLURM_STEP_TASKS_PER_NODE", "2"}}),
                 "SLURM_STEP_TASKS_PER_NODE");
  expect_refused(with(variables, {{"SLURM_NTASKS", "0"}}), "SLURM_NTASKS");
}

TEST(Environment, FirstHostOfANodeList) {
  const std::map<std::string, std::string> lists = {
      {"node7", "node7"},
      {"node7,other8", "node7"},
      {"node[03-05,9]", "node03"},
      {"node[9]", "node9"},
      {"node[1,3],gpu[2-4]", "node1"},
      {"rack[1-2]-gpu[07,9],x", "rack1-gpu07"},
      {"n[001-128].cluster.local,x", "n001.cluster.local"},
  };
  for (const auto& [list, host] : lists) {
    const auto first = first_host(list);
    ASSERT_TRUE(first.ok()) << list << ": " << first.status();
    EXPECT_EQ(host, *first) << list;
  }
  for (const char* bad : {"", ",a", "node[", "node[]", "node[3", "node[,4]"}) {
    EXPECT_FALSE(first_host(bad).ok()) << bad;
  }
}

}  // namespace
}  // namespace baton::launch
