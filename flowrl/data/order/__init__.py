"""The order in which rows are drawn: random per epoch (`epoch_order.EpochOrder`), or by measured success
(`success_order.SuccessOrder`). May import `flowrl.config` and `flowrl.data.messages`.
"""
