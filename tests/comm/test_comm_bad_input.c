/* Invalid groups, and queries of a group. */

#include <torchium/comm.h>

#include "support/comm/pretend_group.h"
#include "support/testing.h"

static tch_status gather(void *user, const void *send, void *receive, int64_t bytes, void *stream)
{
    memmove(receive, send, (size_t)bytes);
    return TCH_OK;
}

static tch_status exchange(void *user, const void *send, void *receive, const tch_comm_counts *counts, void *stream)
{
    memmove(receive, send, (size_t)counts->receive_bytes[0]);
    return TCH_OK;
}

static tch_status reduce(void *user, int32_t *values, int32_t count, void *stream)
{
    return TCH_OK;
}

static const tch_comm_ops good = {sizeof good, gather, exchange, reduce, NULL, NULL, NULL};

static void refuses(const tch_comm_config *config, const char *words)
{
    tch_comm *comm = (tch_comm *)&good;
    tch_status status = tch_comm_create(config, &comm);
    CHECK(status == TCH_ERR_INVALID_ARGUMENT && strstr(tch_last_error(), words) != NULL && comm == NULL, "%s: %s",
          tch_status_name(status), tch_last_error());
}

TEST(bad_configurations)
{
    tch_comm_config c = TCH_COMM_CONFIG_INIT;
    c.ops = &good;
    refuses(NULL, "TCH_COMM_CONFIG_INIT");
    c.struct_size = 1;
    refuses(&c, "TCH_COMM_CONFIG_INIT");
    c = (tch_comm_config)TCH_COMM_CONFIG_INIT;
    refuses(&c, "all_gather, all_to_all and reduce_max");
    tch_comm_ops ops = good;
    ops.reduce_max = NULL;
    c.ops = &ops;
    refuses(&c, "all_gather, all_to_all and reduce_max");
    ops = good;
    ops.struct_size = 8;
    refuses(&c, "struct_size");
    c.ops = &good;
    const int32_t pairs[][2] = {{0, 0}, {-1, 2}, {2, 2}, {0, -3}};
    for (size_t i = 0; i < TEST_COUNT(pairs); i++) {
        c.rank = pairs[i][0];
        c.size = pairs[i][1];
        refuses(&c, "0 <= rank < size");
    }
    c.rank = 0;
    c.size = 1;
    assert_int_equal(tch_comm_create(&c, NULL), TCH_ERR_INVALID_ARGUMENT);
}

TEST(what_a_group_says)
{
    tch_comm_config c = TCH_COMM_CONFIG_INIT;
    tch_comm *comm;
    c.ops = &good;
    c.rank = 2;
    c.size = 5;
    CHECK_OK(tch_comm_create(&c, &comm));
    assert_int_equal(tch_comm_rank(comm), 2);
    assert_int_equal(tch_comm_size(comm), 5);
    tch_comm_traffic traffic = TCH_COMM_TRAFFIC_INIT;
    traffic.bytes = 7;
    CHECK_OK(tch_comm_get_traffic(comm, &traffic));
    assert_int_equal(traffic.bytes, 0);
    assert_int_equal(traffic.collectives, 0);
    traffic.struct_size = 0;
    assert_int_equal(tch_comm_get_traffic(comm, &traffic), TCH_ERR_INVALID_ARGUMENT);
    assert_int_equal(tch_comm_get_traffic(NULL, &traffic), TCH_ERR_INVALID_ARGUMENT);
    tch_comm_destroy(comm);
    tch_comm_destroy(NULL);
    assert_int_equal(tch_comm_rank(NULL), -1);
    assert_int_equal(tch_comm_size(NULL), 0);
}

TEST(nccl_wants_a_gpu)
{
    char id[TCH_NCCL_ID_BYTES] = {0};
    tch_comm *comm = NULL;
    tch_context *context;
    CHECK_OK(tch_context_create("cpu", &context));
    assert_int_equal(tch_comm_create_nccl(context, id, 0, 1, &comm), TCH_ERR_UNSUPPORTED);
    assert_int_equal(tch_comm_create_nccl(NULL, id, 0, 1, &comm), TCH_ERR_UNSUPPORTED);
    assert_int_equal(tch_comm_create_nccl(context, id, 1, 1, &comm), TCH_ERR_INVALID_ARGUMENT);
    assert_int_equal(tch_comm_create_nccl(context, NULL, 0, 1, &comm), TCH_ERR_INVALID_ARGUMENT);
    assert_int_equal(tch_comm_create_nccl(context, id, 0, 1, NULL), TCH_ERR_INVALID_ARGUMENT);
    assert_int_equal(tch_comm_nccl_id(NULL), TCH_ERR_INVALID_ARGUMENT);
    for (int i = 0; i < 3; i++) {
        tch_comm_nccl_config config = TCH_COMM_NCCL_CONFIG_INIT;
        config.timeout_s = (const double[]){-1.0, NAN, INFINITY}[i];
        assert_int_equal(tch_comm_create_nccl_with(context, id, 0, 1, &config, &comm), TCH_ERR_INVALID_ARGUMENT);
        CHECK(strstr(tch_last_error(), "timeout_s") != NULL, "%s", tch_last_error());
    }
    assert_null(comm);
    tch_context_destroy(context);
}

TEST(no_tiles)
{
    tch_optim_tile tile = TCH_OPTIM_TILE_INIT;
    assert_int_equal(tch_optimizer_tile_count(NULL), 0);
    assert_int_equal(tch_optimizer_get_tile(NULL, 0, &tile), TCH_ERR_INVALID_ARGUMENT);
}

TEST_MAIN(NULL, NULL)
