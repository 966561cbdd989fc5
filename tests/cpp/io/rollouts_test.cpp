#include "zorro/io/rollouts.h"

#include <gtest/gtest.h>

#include <cmath>

#include "cpp/io/temporary_folder.h"
#include "io/json_splice.h"
#include "zorro/core/error.h"

namespace zorro {
namespace {

Rollout parse(const std::string& line) { return parse_rollout(line, "r.jsonl", 7); }

void expect_refused(const std::string& line, const std::string& part) {
  try {
    parse(line);
    ADD_FAILURE() << "accepted: " << line;
  } catch (const RolloutError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("r.jsonl:7"), std::string::npos) << text;
    EXPECT_NE(text.find(part), std::string::npos) << text;
    EXPECT_EQ(text.find('\n'), std::string::npos);
  }
}

TEST(Rollout, PromptAndResponse) {
  const Rollout r = parse(
      R"({"prompt_ids":[1,2],"response_ids":[3,4,5],"advantage":0.5,"old_logprobs":[-1,-2,-3],"loss_mask":[1,0,1],
          "temperature":0.7,"id":12,"group":"g"})");
  EXPECT_EQ(r.token_ids, (std::vector<int64_t>{1, 2, 3, 4, 5}));
  EXPECT_EQ(r.scored_begin, 2);
  EXPECT_EQ(r.num_scored(), 3);
  EXPECT_EQ(r.advantages, (std::vector<double>{0.5, 0.5, 0.5}));
  EXPECT_EQ(r.old_logprobs, (std::vector<double>{-1, -2, -3}));
  EXPECT_TRUE(r.ref_logprobs.empty());
  EXPECT_EQ(r.loss_mask, (std::vector<uint8_t>{1, 0, 1}));
  EXPECT_EQ(r.temperature, 0.7);
  EXPECT_EQ(r.id, "12");
  EXPECT_EQ(r.group, "g");
}

TEST(Rollout, DefaultsAndEmptyResponse) {
  const Rollout r =
      parse(R"({"prompt_ids":[1],"response_ids":[],"advantage":1,"old_logprobs":[]})");
  EXPECT_EQ(r.num_scored(), 0);
  EXPECT_EQ(r.id, "7");
  EXPECT_FALSE(r.temperature.has_value());
  EXPECT_EQ(parse(R"({"prompt_ids":[1],"response_ids":[2]})").loss_mask, (std::vector<uint8_t>{1}));
}

TEST(Rollout, MultiTurnHasOneValueAToken) {
  const Rollout r = parse(
      R"({"token_ids":[1,2,3,4],"loss_mask":[0,0,1,true],"old_logprobs":[null,-1,-2,-3],"advantage":[9,1,2,3]})");
  EXPECT_TRUE(r.multi_turn);
  EXPECT_EQ(r.scored_begin, 1);
  EXPECT_EQ(r.prompt_length, 2);
  EXPECT_EQ(r.loss_mask, (std::vector<uint8_t>{0, 1, 1}));
  EXPECT_EQ(r.old_logprobs, (std::vector<double>{-1, -2, -3}));
  EXPECT_EQ(r.advantages, (std::vector<double>{1, 2, 3}));
}

TEST(Rollout, BadLinesNameFileLineAndKey) {
  expect_refused("{", "valid JSON");
  expect_refused("[1]", "JSON object");
  expect_refused(R"({"prompt_ids":[1],"response_ids":[2],"advantage":NaN})", "valid JSON");
  expect_refused(R"({"prompt_ids":[1],"response_ids":[2],"advantage":"x"})", "\"advantage\"");
  expect_refused(R"({"prompt_ids":[1],"response_ids":[2],"advantage":[1,2]})", "\"advantage\"");
  expect_refused(R"({"prompt_ids":[1],"response_ids":[2],"old_logprobs":[null]})",
                 "\"old_logprobs\"");
  expect_refused(R"({"prompt_ids":[1],"response_ids":[2],"ref_logprobs":3})", "\"ref_logprobs\"");
  expect_refused(R"({"prompt_ids":[1],"response_ids":[2],"loss_mask":[2]})", "\"loss_mask\"");
  expect_refused(R"({"prompt_ids":[1],"response_ids":[2],"loss_mask":[1,1]})", "got 2");
  expect_refused(R"({"response_ids":[2]})", "\"prompt_ids\"");
  expect_refused(R"({"prompt_ids":[1]})", "\"response_ids\"");
  expect_refused(R"({"prompt_ids":[],"response_ids":[2]})", "at least one token");
  expect_refused(R"({"prompt_ids":[-1],"response_ids":[2]})", "token ids >= 0");
  expect_refused(R"({"prompt_ids":[1.5],"response_ids":[2]})", "token ids >= 0");
  expect_refused(R"({"prompt_ids":[1],"response_ids":[2],"id":[1]})", "\"id\"");
  expect_refused(R"({"prompt_ids":[1],"response_ids":[2],"id":1,"id":2})", "given once");
  expect_refused(R"({"token_ids":[1],"prompt_ids":[1]})", "got both");
  expect_refused(R"({"token_ids":[1,2]})", "\"loss_mask\"");
  expect_refused(R"({"token_ids":[],"loss_mask":[]})", "must hold a token");
  expect_refused(R"({"token_ids":[1,2],"loss_mask":[1,1]})", "begin with 0");
}

TEST(Rollout, B24_TemperatureMustBePositive) {
  for (const char* value : {"0", "-1", "-0.5"})
    expect_refused(concat(R"({"prompt_ids":[1],"response_ids":[2],"temperature":)", value, "}"),
                   "temperature");
}

TEST(RolloutReader, ReadsPlainAndGzipAlikeAndKeepsTheOrder) {
  const TemporaryFolder folder;
  const std::string text =
      "{\"prompt_ids\":[1],\"response_ids\":[2]}\r\n\n  "
      "\n{\"prompt_ids\":[3],\"response_ids\":[4],\"x\":1.50}";
  folder.write("a.jsonl", text);
  const auto plain = read_rollouts(folder / "a.jsonl");
  ASSERT_EQ(plain.size(), 2U);
  EXPECT_EQ(plain[1].line, 4);
  RolloutWriter writer(folder / "b.jsonl.gz");
  for (const Rollout& rollout : plain) writer.write(rollout, {{"logprobs", {-0.1F}}});
  writer.commit();
  const auto zipped = read_rollouts(folder / "b.jsonl.gz");
  ASSERT_EQ(zipped.size(), 2U);
  EXPECT_EQ(zipped[1].token_ids, plain[1].token_ids);
  EXPECT_EQ(zipped[1].json,
            R"({"prompt_ids":[3],"response_ids":[4],"x":1.50, "logprobs": [-0.1]})");
}

TEST(RolloutReader, LongFilesCrossBlocks) {
  const TemporaryFolder folder;
  std::string text;
  for (int line = 0; line < 3000; ++line) {
    text += R"({"prompt_ids":[)" + std::to_string(line);
    for (int i = 0; i < 300; ++i) text += ",5";
    text += "],\"response_ids\":[1]}\n";
  }
  RolloutReader reader(folder.write("a.jsonl", text));
  for (int line = 0; line < 3000; ++line) {
    const auto rollout = reader.next();
    ASSERT_TRUE(rollout.has_value());
    ASSERT_EQ(rollout->token_ids.front(), line);
    ASSERT_EQ(rollout->token_ids.size(), 302U);
  }
  EXPECT_FALSE(reader.next().has_value());
  EXPECT_EQ(reader.fraction_read(), 1.0);
}

TEST(RolloutReader, SkipsAndCountsBadLinesWhenAsked) {
  const TemporaryFolder folder;
  folder.write("a.jsonl", "nonsense\n{\"prompt_ids\":[1],\"response_ids\":[2]}\n{\n");
  EXPECT_THROW(read_rollouts(folder / "a.jsonl"), RolloutError);
  RolloutReader reader(folder / "a.jsonl", {.skip_bad = true});
  EXPECT_TRUE(reader.next().has_value());
  EXPECT_FALSE(reader.next().has_value());
  EXPECT_EQ(reader.num_skipped(), 2);
}

TEST(RolloutReader, FilesThatCannotBeReadAreErrors) {
  const TemporaryFolder folder;
  EXPECT_THROW(read_rollouts(folder / "absent.jsonl"), RolloutError);
  EXPECT_THROW(read_rollouts(folder.path()), RolloutError);
  EXPECT_THROW(read_rollouts(folder.write("empty.jsonl", "")), RolloutError);
  EXPECT_THROW(read_rollouts(folder.write("blank.jsonl", "\n\n")), RolloutError);
  EXPECT_THROW(read_rollouts(folder.write("plain.jsonl.gz", "{}")), RolloutError);
  EXPECT_THROW(read_rollouts(folder.write("bad.jsonl", "x"), {.skip_bad = true}), RolloutError);
  RolloutWriter writer(folder / "a.jsonl.gz");
  std::string json = R"({"prompt_ids":[1],"response_ids":[2],"text":")";
  for (int i = 0; i < 1000; ++i) json += std::to_string(i * 7919);
  for (int i = 0; i < 50; ++i) writer.write(parse(json + "\"}"), {});
  writer.commit();
  const std::string bytes = read_bytes(folder / "a.jsonl.gz");
  EXPECT_THROW(read_rollouts(folder.write("cut.jsonl.gz", bytes.substr(0, bytes.size() / 2))),
               RolloutError);
}

TEST(RolloutWriter, WritesTheShortestTextThatReadsBack) {
  const TemporaryFolder folder;
  const std::vector<float> values = {-0.1F, 1e-30F, 123456.789F, -1.0F / 3};
  RolloutWriter writer(folder / "a.jsonl");
  writer.write(parse(R"({"prompt_ids":[1],"response_ids":[2,3,4,5]})"), {{"old_logprobs", values}});
  writer.commit();
  const auto back = read_rollouts(folder / "a.jsonl");
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(static_cast<float>(back[0].old_logprobs[i]), values[i]);
  EXPECT_NE(back[0].json.find("-0.1, 1e-30, 123456.79, -0.33333334"), std::string::npos);
}

TEST(RolloutWriter, MultiTurnValuesBeginWithNull) {
  const TemporaryFolder folder;
  RolloutWriter writer(folder / "a.jsonl");
  writer.write(parse(R"({"token_ids":[1,2],"loss_mask":[0,1]})"), {{"logprobs", {-2}}});
  writer.commit();
  EXPECT_EQ(read_bytes(folder / "a.jsonl"),
            "{\"token_ids\":[1,2],\"loss_mask\":[0,1], \"logprobs\": [null, -2]}\n");
}

TEST(RolloutWriter, WithoutCommitNothingRemains) {
  const TemporaryFolder folder;
  {
    RolloutWriter writer(folder / "a.jsonl");
    writer.write(parse(R"({"prompt_ids":[1],"response_ids":[2]})"), {{"logprobs", {-2}}});
  }
  {
    RolloutWriter writer(folder / "b.jsonl");
    EXPECT_THROW(
        writer.write(parse(R"({"prompt_ids":[1],"response_ids":[2]})"), {{"logprobs", {NAN}}}),
        InternalError);
  }
  EXPECT_EQ(folder.num_entries(), 0U);
  EXPECT_THROW(RolloutWriter(folder / "absent/a.jsonl"), RolloutError);
}

TEST(JsonSplice, ReplacesAndAppendsAndLeavesTheRest) {
  EXPECT_EQ(
      splice_json(R"({"a": 1.50 , "b":{"a":[1,"}"]},"c\"":"\\"})", {{"a", "2"}, {"d", "[3]"}}),
      R"({"a": 2, "b":{"a":[1,"}"]},"c\"":"\\", "d": [3]})");
  EXPECT_EQ(splice_json(" { } ", {{"a", "1"}}), " { \"a\": 1} ");
  EXPECT_EQ(splice_json(R"({"a":[1,2],"b":3})", {{"a", "[]"}}), R"({"a":[],"b":3})");
  EXPECT_THROW(splice_json("{\"a\":1", {}), InternalError);
}

}  // namespace
}  // namespace zorro
